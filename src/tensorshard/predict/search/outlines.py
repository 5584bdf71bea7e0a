"""Plans of a deep model as its estimates outline them for a few of its blocks: nearly the full estimate, and soon."""

from collections.abc import Callable, Sequence
from functools import partial

from tensorshard.plan.plan import Plan
from tensorshard.predict.caching_allocator import LARGE_SEGMENT
from tensorshard.predict.estimate import Estimate
from tensorshard.predict.search.fewer_blocks import additional_blocks
from tensorshard.predict.search.predictions import Prediction
from tensorshard.predict.search.question import Question
from tensorshard.predict.step_time import COMMUNICATION

_WORTH_IT = 24  # with at least so many equal blocks, two estimates with a few of them take less time than one with all


def can_outline(question: Question, plan: Plan, equal_blocks: Sequence[str]) -> bool:
    """Whether `plan` can be outlined, and its estimate takes so long that this is worth it."""
    return question.can_be_shortened and plan.pp == 1 and len(equal_blocks) >= _WORTH_IT


def outline(question: Question, plan: Plan, equal_blocks: Sequence[str]) -> Prediction:
    """The memory and the time of a plan, on the line through those of two models with a few of its equal blocks.

    Memory is the largest of several sums, each of which grows linearly with the blocks, and so are the parts of a
    step's time. So both are lower bounds of what the estimate says, and near it. What an allocator reserves beyond live
    tensors counts as for the few blocks, less one segment.

    Raises:
        Exception: a model that needs all of its blocks may raise anything.
    """
    few, more = question.with_few_blocks(
        partial(_estimated, plan), equal_blocks, plan.tp, sequence_parallel=plan.sequence_parallel
    )
    times = additional_blocks(equal_blocks)

    def line(of: Callable[[Estimate], float]) -> float:
        start, end = of(few), of(more)
        return end + times * (end - start)

    live = line(lambda found: found.largest.peak_allocated)
    beside = more.largest.peak_device - more.largest.peak_allocated - LARGE_SEGMENT
    beside = max(beside, question.hardware.context)
    return Prediction(int(live) + beside, line(question.seconds), 0.0, line(_communication))


def _estimated(plan: Plan, short: Question) -> Estimate:
    return short.estimate(plan, borrow=True)


def _communication(found: Estimate) -> float:
    assert found.step_time is not None  # the hardware has rates
    return found.step_time.by_category.get(COMMUNICATION, 0.0)
