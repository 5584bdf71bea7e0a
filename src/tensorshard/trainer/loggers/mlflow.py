"""MLflow, where the package is installed."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorshard.config import ConfigError
from tensorshard.trainer.loggers.kept_id import keep_id, read_id
from tensorshard.trainer.loggers.logger import Logger

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
        kept = read_id(file)
        if kept is not None:
            client.update_run(kept, status="RUNNING")
            return kept
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tensorshard")
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_id: str = client.create_run(number, run_name=self.directory.name).info.run_id
        keep_id(file, run_id)
        return run_id

    def _write_parameters(self, client: Any, step: int) -> None:
        from mlflow.entities import Param, RunTag

        there = client.get_run(self._run_id).data.params
        given = dict(_flat(self.config))
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


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of a nested `config` as text, by keys such as ``train.steps``."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
