"""``train.loggers``: what wandb and MLflow are called with. Their packages need not be installed."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tensorshard.config import ConfigError, load_config
from tensorshard.trainer import LoggingHook, Trainer
from tensorshard.trainer.loggers import MlflowLogger, TensorBoardLogger, WandbLogger, service_logger, services
from tensorshard.trainer.settings import TrainSettings
from trainer_doubles import CountingEngine, regression_batches

_CONFIG = {"train": {"steps": 4, "plan": {"zero": 3}}, "optimizer": {"betas": [0.9, 0.95]}}

Calls = list[tuple[Any, ...]]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of a package ``wandb`` whose functions take what those of wandb 0.31 do."""
    calls: Calls = []

    class Error(Exception):
        pass

    class Run:
        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            calls.append(("log", data, step))

        def define_metric(self, name: str, step_metric: str | None = None, step_sync: bool | None = None) -> None:
            calls.append(("define_metric", name, step_metric))

        def finish(self, exit_code: int | None = None) -> None:
            calls.append(("finish", exit_code))

    def init(
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: list[str] | None = None,
        config: dict[str, Any] | None = None,
        mode: str | None = None,
        resume: bool | str | None = None,
    ) -> Run:
        if project == "forbidden":
            raise Error("No API key configured.")
        calls.append(("init", project, dir, id, name, config, resume))
        return Run()

    package = ModuleType("wandb")
    vars(package).update(init=init, Run=Run, errors=SimpleNamespace(Error=Error))
    monkeypatch.setitem(sys.modules, "wandb", package)
    for variable in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(variable, raising=False)
    return calls


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of a package ``mlflow`` whose functions take what those of MLflow 3.17 do."""
    calls: Calls = []
    runs: dict[str, dict[str, str]] = {}

    class MlflowException(Exception):
        pass

    def record(name: str) -> Callable[..., Any]:
        return lambda *arguments: (name, *arguments)

    class MlflowClient:
        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="7") if runs else None

        def create_experiment(
            self, name: str, artifact_location: str | None = None, tags: dict[str, Any] | None = None
        ) -> str:
            calls.append(("create_experiment", name))
            return "7"

        def create_run(
            self,
            experiment_id: str,
            start_time: int | None = None,
            tags: dict[str, Any] | None = None,
            run_name: str | None = None,
        ) -> Any:
            calls.append(("create_run", experiment_id, run_name))
            runs["r1"] = {}
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
            if run_id not in runs:
                raise MlflowException(f"Run with id={run_id} not found")
            calls.append(("update_run", run_id, status))

        def get_run(self, run_id: str) -> Any:
            return SimpleNamespace(data=SimpleNamespace(params=dict(runs[run_id])))

        def log_batch(
            self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = (), synchronous: bool | None = None
        ) -> None:
            if any(metric[1] == "refused" for metric in metrics):
                raise MlflowException("the server is away")
            runs[run_id].update({key: value for _, key, value in params})
            calls.extend((name, key, value, at) for name, key, value, _, at in metrics)
            calls.extend([*params, *tags])

        def set_terminated(self, run_id: str, status: str | None = None, end_time: int | None = None) -> None:
            calls.append(("set_terminated", run_id, status))

    package, entities, exceptions = (ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.exceptions"))
    vars(package).update(MlflowClient=MlflowClient, get_tracking_uri=lambda: "sqlite:///mlflow.db")
    vars(entities).update({name: record(name) for name in ("Metric", "Param", "RunTag")})
    vars(exceptions).update(MlflowException=MlflowException)
    for module in (package, entities, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return calls


def _train(logger: Any, begin: int, steps: int, inputs: int = 2) -> None:
    engine = CountingEngine()
    engine.step_count = begin
    batches = regression_batches() if inputs == 2 else [(batch[:, :1], None) for batch, _ in regression_batches()]
    Trainer(engine, batches, max_steps=steps, hooks=[LoggingHook([logger])]).fit()  # type: ignore[arg-type]


def test_wandb_is_told_the_config_and_each_step_and_a_resumed_run_goes_on(wandb: Calls, tmp_path: Path) -> None:
    directory = tmp_path / "run-1"
    directory.mkdir()
    _train(WandbLogger(directory, _CONFIG), 0, 2)
    _train(WandbLogger(directory, _CONFIG), 1, 2)
    known_as = (directory / "wandb.id").read_text().strip()
    begun = ("init", "tensorshard", str(directory), known_as, "run-1", _CONFIG, "allow")
    assert [call for call in wandb if call[0] == "init"] == [begun, begun]
    assert wandb[1:3] == [("define_metric", "step", None), ("define_metric", "*", "step")]
    logged = [call for call in wandb if call[0] == "log"]
    assert [(data["step"], step) for _, data, step in logged] == [(1, None), (2, None), (2, None)]
    assert {"loss", "lr", "samples"} <= logged[0][1].keys()
    assert wandb[-1] == ("finish", 0)


def test_wandb_offline_and_a_run_that_failed(wandb: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")  # where wandb warns that it ignores `resume`
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with pytest.raises(RuntimeError):
        _train(WandbLogger(tmp_path, _CONFIG), 0, 2, inputs=1)
    assert wandb[0][1] == "mine" and wandb[0][-1] is None and wandb[-1] == ("finish", 1)
    monkeypatch.setenv("WANDB_PROJECT", "forbidden")
    with pytest.raises(ConfigError, match=r"wandb did not start \(No API key configured\.\); call `wandb login`, or"):
        WandbLogger(tmp_path, _CONFIG).start(0, 1)


def test_mlflow_is_told_the_config_and_each_step_and_a_resumed_run_goes_on(mlflow: Calls, tmp_path: Path) -> None:
    directory = tmp_path / "run-1"
    directory.mkdir()
    _train(MlflowLogger(directory, _CONFIG), 0, 2)
    assert mlflow[:2] == [("create_experiment", "tensorshard"), ("create_run", "7", "run-1")]
    parameters = [call for call in mlflow if call[0] == "Param"]
    assert parameters == [
        ("Param", "train.steps", "4"),
        ("Param", "train.plan.zero", "3"),
        ("Param", "optimizer.betas", "[0.9, 0.95]"),
    ]
    assert [call[3] for call in mlflow if call[:2] == ("Metric", "loss")] == [1, 2]
    assert all(isinstance(call[2], float) for call in mlflow if call[0] == "Metric")
    assert mlflow[-1] == ("set_terminated", "r1", "FINISHED")
    mlflow.clear()
    changed = {"train": {"steps": 9, "plan": {"zero": 3}}, "new": True}
    with pytest.raises(RuntimeError):
        _train(MlflowLogger(directory, changed), 2, 3, inputs=1)
    assert mlflow == [
        ("update_run", "r1", "RUNNING"),
        ("Param", "new", "True"),
        ("RunTag", "train.steps from step 3", "9"),
        ("set_terminated", "r1", "FAILED"),
    ]


def test_a_run_goes_on_where_mlflow_is_away_and_does_not_begin_where_it_is_lost(
    mlflow: Calls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = MlflowLogger(tmp_path, {})
    logger.start(0, 2)
    for step in (1, 2):
        logger.log(step, {"refused": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "mlflow did not take the measurements of step 1, and perhaps of later ones: the server is away"
    ]
    (tmp_path / "mlflow.id").write_text("lost")
    with pytest.raises(ConfigError, match=r"id=lost not found\).* delete .*mlflow\.id to begin another run there"):
        MlflowLogger(tmp_path, {}).start(0, 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[wandbb]", "train.loggers has 'wandbb'; did you mean 'wandb'?"),
        ("wandb", "train.loggers is 'wandb'; expected a list of names, such as [tensorboard, wandb]"),
        ("[mlflow]", "train.loggers has 'mlflow', and the package mlflow is missing: pip install mlflow"),
        ("[tensorboard, tensorboard]", "train.loggers has 'tensorboard' twice"),
    ],
)
def test_loggers_that_cannot_be_had_are_refused_before_training(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "is_installed", lambda name: name != "mlflow")
    with pytest.raises(ConfigError, match=r"train\.loggers") as caught:
        TrainSettings.from_config(load_config("quickstart", [f"train.loggers={value}"]))
    assert message in str(caught.value)


def test_without_a_choice_it_is_tensorboard_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for there, expected in ((True, ["tensorboard"]), (False, [])):
        monkeypatch.setattr(services, "is_installed", lambda name, there=there: there)
        assert TrainSettings.from_config(load_config("quickstart")).loggers == expected
    monkeypatch.setattr(services, "is_installed", lambda name: True)
    chosen = TrainSettings.from_config(
        load_config("quickstart", ["train.loggers=[mlflow, wandb, tensorboard]"])
    ).loggers
    made = [service_logger(name, tmp_path, {}) for name in chosen]
    assert [type(logger) for logger in made] == [MlflowLogger, WandbLogger, TensorBoardLogger]
