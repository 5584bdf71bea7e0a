"""Programs to which measurements are also written: TensorBoard, Weights & Biases, MLflow (``train.loggers``)."""

import importlib.util
import logging
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorshard.common.words import flat_items
from tensorshard.config import ConfigError
from tensorshard.config.lazy import suggest
from tensorshard.trainer.loggers.files import Logger

SERVICES = ("tensorboard", "wandb", "mlflow")


def chosen_services(names: Any) -> list[str]:
    """The value of ``train.loggers``, checked; None stands for TensorBoard, if it is installed.

    Raises:
        ConfigError: `names` is not a list of known names, or a package is missing. Nothing is imported to find out.
    """
    if names is None:
        return ["tensorboard"] if is_installed("tensorboard") else []
    if not isinstance(names, list):
        raise ConfigError(f"train.loggers is {names!r}; expected a list of names, such as [tensorboard, wandb]")
    for name in names:
        if name not in SERVICES:
            raise ConfigError(f"train.loggers has {name!r}; {suggest(str(name), SERVICES, 'the loggers there are')}")
        if not is_installed(name):
            raise ConfigError(f"train.loggers has {name!r}, and the package {name} is missing: pip install {name}")
    if twice := [name for name in SERVICES if names.count(name) > 1]:
        raise ConfigError(f"train.loggers has {twice[0]!r} twice; once is enough")
    return names


def is_installed(package: str) -> bool:
    """Whether `package` can be imported. This does not import it."""
    return importlib.util.find_spec(package) is not None


def service_logger(name: str, directory: Path, config: Mapping[str, Any]) -> Logger:
    """The logger for one of :data:`SERVICES`.

    Args:
        directory: of the run.
        config: of the run, nested, as its hyperparameters.
    """
    if name == "wandb":
        return WandbLogger(directory, config)
    if name == "mlflow":
        return MlflowLogger(directory, config)
    return TensorBoardLogger(directory / "tensorboard")


def read_id(path: Path) -> str | None:
    """The id in the file `path`; None if there is none yet."""
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def keep_id(path: Path, name: str) -> None:
    """Writes the id `name` to the file `path`."""
    path.write_text(f"{name}\n", encoding="utf-8")


class TensorBoardLogger(Logger):
    """Writes each measurement as a scalar. A resumed run hides what the earlier run wrote for later steps.

    Args:
        directory: for the event files; read with ``tensorboard --logdir``.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def start(self, step: int, max_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.directory), purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.close()


class WandbLogger(Logger):
    """A run of Weights & Biases, named after the run's directory, in the project "tensorshard".

    wandb's own environment variables hold: ``WANDB_PROJECT`` for another project, ``WANDB_MODE=offline`` for files that
    ``wandb sync`` uploads later. A resumed run goes on under its id, which is kept in ``wandb.id``.

    Args:
        directory: of the run; wandb's files go to its folder ``wandb``.
        config: nested; Weights & Biases shows its values as the run's hyperparameters.
    """

    def __init__(self, directory: str | Path, config: Mapping[str, Any]) -> None:
        self.directory = Path(directory)
        self.config = dict(config)
        self._run: Any = None
        self._exit_code = 0

    def start(self, step: int, max_steps: int) -> None:
        """Begins or continues the run.

        Raises:
            ConfigError: wandb cannot do so: there is no login, or no network.
        """
        import wandb

        file = self.directory / "wandb.id"
        name = read_id(file) or uuid.uuid4().hex[:8]
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "tensorshard"),
                name=os.environ.get("WANDB_NAME", self.directory.name),
                dir=str(self.directory),
                config=self.config,
                id=name,
                resume="allow" if os.environ.get("WANDB_MODE", "online") == "online" else None,
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"train.loggers: wandb did not start ({str(error).strip()}); call `wandb login`, or set "
                f"WANDB_MODE=offline and upload with `wandb sync` later"
            ) from error
        keep_id(file, name)
        # wandb's own count of steps only grows; a run that is resumed from an earlier checkpoint goes back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def failed(self, error: Exception) -> None:
        self._exit_code = 1

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)
            self._run = None


logger = logging.getLogger("tensorshard")

_ID = "mlflow.id"
_PARAMETERS_A_CALL, _METRICS_A_CALL = 100, 1000  # MLflow's limits


class MlflowLogger(Logger):
    """A run of MLflow, named after the run's directory, in the experiment "tensorshard".

    MLflow's own environment variables hold: ``MLFLOW_TRACKING_URI`` for a server, a database or a folder (without it
    MLflow writes to this machine), ``MLFLOW_EXPERIMENT_NAME`` for another experiment. A resumed run goes on under its
    id, which is kept in ``mlflow.id``; parameters that it changes are written as tags, as MLflow's own are final.

    Args:
        directory: of the run.
        config: nested; MLflow shows its values as the run's parameters.
    """

    def __init__(self, directory: str | Path, config: Mapping[str, Any]) -> None:
        self.directory = Path(directory)
        self.config = config
        self._client: Any = None
        self._status = "FINISHED"
        self._warned = False

    def start(self, step: int, max_steps: int) -> None:
        """Begins or continues the run.

        Raises:
            ConfigError: MLflow cannot do so: there is no network, or the run that is to be continued does not exist.
        """
        import mlflow
        from mlflow.exceptions import MlflowException

        client = mlflow.MlflowClient()
        try:
            self._run_id = self._begin(client)
            self._write_parameters(client, step)
        except MlflowException as error:
            file = self.directory / _ID
            remedy = f"; delete {file} to begin another run there" if file.is_file() else ""
            raise ConfigError(
                f"train.loggers: mlflow did not start at {mlflow.get_tracking_uri()} ({error}); MLFLOW_TRACKING_URI "
                f"names a server, a database or a folder{remedy}"
            ) from error
        self._client = client

    def _begin(self, client: Any) -> str:
        file = self.directory / _ID
        saved_id = read_id(file)
        if saved_id is not None:
            client.update_run(saved_id, status="RUNNING")
            return saved_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tensorshard")
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_id: str = client.create_run(number, run_name=self.directory.name).info.run_id
        keep_id(file, run_id)
        return run_id

    def _write_parameters(self, client: Any, step: int) -> None:
        from mlflow.entities import Param, RunTag

        there = client.get_run(self._run_id).data.params
        given = dict(flat_items(self.config))
        new = [Param(key, value) for key, value in given.items() if key not in there]
        changed = [(key, value) for key, value in given.items() if there.get(key, value) != value]
        for first in range(0, len(new), _PARAMETERS_A_CALL):
            client.log_batch(self._run_id, params=new[first : first + _PARAMETERS_A_CALL])
        client.log_batch(self._run_id, tags=[RunTag(f"{key} from step {step + 1}", value) for key, value in changed])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the measurements. If MLflow does not take them, the log says so once, and training goes on."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        now = int(time.time() * 1000)
        try:
            taken = [Metric(name, float(value), now, step) for name, value in metrics.items()]
            for first in range(0, len(taken), _METRICS_A_CALL):
                self._client.log_batch(self._run_id, metrics=taken[first : first + _METRICS_A_CALL])
        except MlflowException as error:
            if not self._warned:
                logger.warning(
                    "mlflow did not take the measurements of step %d, and perhaps of later ones: %s", step, error
                )
            self._warned = True

    def failed(self, error: Exception) -> None:
        self._status = "FAILED"

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id, status=self._status)
            self._client = None
