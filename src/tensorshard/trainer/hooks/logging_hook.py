"""Logs the measurements of steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.loggers.logger import Logger
from tensorshard.trainer.step_record import StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer


class LoggingHook(Hook):
    """Hands the loss, the learning rate, the gradient norm and the other hooks' metrics to loggers.

    It logs the first step, every `every` steps, the last one, and any step after which something was
    evaluated. Put it after the hooks that measure. Ranks that write nothing have no loggers, and never wait
    for the loss.

    Args:
        loggers: where to write.
        every: steps between lines.
    """

    def __init__(self, loggers: Sequence[Logger], every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected at least 1 step.")
        self.loggers = list(loggers)
        self.every = every

    def before_train(self, trainer: "Trainer") -> None:
        for logger in self.loggers:
            logger.start(trainer.step, trainer.max_steps)

    def before_step(self, trainer: "Trainer") -> None:
        # Measuring the norm communicates, so every rank does it, and only for steps that are written down.
        trainer.engine.measure_grad_norm = self._is_due(trainer, trainer.step + 1)

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        if not self.loggers:
            return
        for logger in self.loggers:
            logger.step_done(record.step)
        evaluated = any(name.startswith("val_") for name in record.metrics)
        if evaluated or self._is_due(trainer, record.step):
            metrics = self._metrics(trainer, record)
            for logger in self.loggers:
                logger.log(record.step, metrics)

    def on_error(self, trainer: "Trainer", error: Exception) -> None:
        for logger in self.loggers:
            logger.failed(error)

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()

    def _is_due(self, trainer: "Trainer", step: int) -> bool:
        return step % self.every == 0 or step in (1, trainer.max_steps)

    def _metrics(self, trainer: "Trainer", record: StepRecord) -> dict[str, float]:
        metrics = {"loss": record.loss.item(), "lr": float(trainer.engine.optimizer.param_groups[0]["lr"])}
        if trainer.engine.grad_norm is not None:
            metrics["grad_norm"] = float(trainer.engine.grad_norm)
        return metrics | record.metrics | {"samples": trainer.samples_consumed}
