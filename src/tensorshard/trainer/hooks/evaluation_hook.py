"""Evaluation between training steps."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorshard.trainer.evaluators import Evaluator
from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.step_record import StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer

logger = logging.getLogger("tensorshard")


class EvaluationHook(Hook):
    """Runs evaluators every `every` steps and after the last one; what they return joins the step's metrics.

    Args:
        evaluators: run in this order.
        every: steps between evaluations; 0 for one at the end alone.

    Attributes:
        latest: the last results, empty before the first evaluation.
    """

    def __init__(self, evaluators: Sequence[Evaluator], every: int) -> None:
        if every < 0:
            raise ValueError(f"every is {every}; expected a number of steps, or 0 for an evaluation at the end alone.")
        self.evaluators = list(evaluators)
        self.every = every
        self.latest: dict[str, float] = {}

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        due = self.every and record.step % self.every == 0
        if not due and record.step != trainer.max_steps:
            return
        for evaluator in self.evaluators:
            self.latest |= evaluator.evaluate(trainer.engine)
        record.metrics |= self.latest
        logger.debug("evaluated after step %d: %s", record.step, self.latest)
