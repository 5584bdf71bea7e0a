"""The learning rate, step by step."""

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from tensorshard.trainer.hooks.base import Hook
from tensorshard.trainer.step_record import StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer


class ScheduleHook(Hook):
    """Moves any torch ``LRScheduler`` on by one after each step, and keeps its state in checkpoints.

    Put it after the hook that logs, so that the rate in the log is the one that the step was taken with.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)
