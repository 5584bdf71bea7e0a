"""TensorBoard event files, where the package is installed."""

from collections.abc import Mapping
from pathlib import Path

from tensorshard.trainer.loggers.logger import Logger


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
