"""The learning rate, step by step."""

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from tensorshard.torch_private.optimizers import set_last_rates
from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.step_record import StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer


class ScheduleHook(Hook):
    """Moves any torch ``LRScheduler`` on by one after each step, and keeps its state in checkpoints.

    Put it after the hook that logs, so that the log has the rate with which the step was taken.

    A resumed run may have another peak rate or another number of steps than the run that it continues. A schedule
    that is a function of the step (a ``LambdaLR``, as all of :mod:`tensorshard.trainer.schedulers` are) then goes
    on as if it had had these values from the start.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave.

        Raises:
            ValueError: the peak rates have changed, and the schedule is not a function of the step.
        """
        peaks = getattr(self.scheduler, "base_lrs", None)
        if isinstance(self.scheduler, LambdaLR):
            self.scheduler.load_state_dict({**state, "base_lrs": peaks})
            _set_rates(self.scheduler)
        elif peaks != state.get("base_lrs"):
            raise ValueError(
                f"the learning rates were {state.get('base_lrs')} and now are {peaks}, but a "
                f"{type(self.scheduler).__name__} cannot change them on the way; keep them, or use a LambdaLR"
            )
        else:
            self.scheduler.load_state_dict(state)


def _set_rates(schedule: LambdaLR) -> None:
    """Gives the optimizer the rates of the step that `schedule` stands at."""
    ratios = [ratio(schedule.last_epoch) for ratio in schedule.lr_lambdas]
    rates = [peak * ratio for peak, ratio in zip(schedule.base_lrs, ratios, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    set_last_rates(schedule, rates)
