"""Weights & Biases, where the package is installed."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorshard.config import ConfigError
from tensorshard.trainer.loggers.kept_id import keep_id, read_id
from tensorshard.trainer.loggers.logger import Logger


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
