"""``train.loggers``: names of the programs for which a run's measurements are also written."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorshard.config import ConfigError
from tensorshard.config.config_error import suggest
from tensorshard.trainer.loggers.logger import Logger
from tensorshard.trainer.loggers.mlflow import MlflowLogger
from tensorshard.trainer.loggers.tensorboard import TensorBoardLogger
from tensorshard.trainer.loggers.wandb import WandbLogger

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
