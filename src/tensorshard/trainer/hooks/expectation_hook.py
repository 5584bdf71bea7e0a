"""Compares a run's estimate with what is measured in its first steps."""

import logging
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorshard.common.quantities import size_text
from tensorshard.predict import Estimate
from tensorshard.predict.hardware import save_ratios
from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.memory import PeakMemory
from tensorshard.trainer.step_record import StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer

logger = logging.getLogger("tensorshard")

STEPS = 10
"""After how many steps the comparison is made."""

_WARM_UP = 3  # steps that are slower: they allocate, and fill caches
_LEAST_MEMORY = 256 << 20  # bytes of an estimate; below this, the libraries' own memory would distort the ratio


class ExpectationHook(Hook):
    """After :data:`STEPS` steps, says what was estimated and what was measured on rank 0, and keeps the ratios.

    If the estimate was made with this machine's profile, the ratios go into that profile, for later searches. That of
    memory does if it is large enough, and freed memory is not kept: where memory is scarce, a rank gives it back.

    Args:
        expected: the run's estimate.
        memory: of this process.
        held_before: bytes that it held before the model was made.
        clock: seconds of some monotonic clock.
    """

    def __init__(
        self,
        expected: Estimate,
        memory: PeakMemory,
        held_before: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._expected = expected
        self._memory = memory
        self._held_before = held_before
        self._clock = clock
        self._started = 0.0
        self._seconds: list[float] = []

    def before_step(self, trainer: "Trainer") -> None:
        self._started = self._clock()

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        if len(self._seconds) == STEPS:
            return
        self._seconds.append(self._clock() - self._started)
        if len(self._seconds) == STEPS:
            self._compare(keeps_freed_memory=trainer.engine.keeps_freed_memory)

    def _compare(self, *, keeps_freed_memory: bool) -> None:
        hardware = self._expected.hardware
        lines, ratios = [], {}
        estimated = self._expected.step_seconds
        if estimated is not None:
            measured = statistics.median(self._seconds[_WARM_UP:])
            ratios["time_ratio"] = measured / estimated
            lines.append(f"a step was estimated to take {estimated:.4g} s, and takes {measured:.4g} s")
        estimated_bytes = self._expected.ranks[0].peak_allocated
        measured_bytes = self._memory.bytes() - self._held_before
        if estimated_bytes >= _LEAST_MEMORY and not keeps_freed_memory:
            ratios["memory_ratio"] = max(1.0, measured_bytes / estimated_bytes)
        lines.append(
            f"memory was estimated to be {size_text(estimated_bytes)} of live tensors, and is "
            f"{size_text(measured_bytes)} beyond the start" + ", with freed memory that is kept" * keeps_freed_memory
        )
        if ratios and hardware is not None and hardware.is_measured and save_ratios(**ratios) is not None:
            lines.append("later searches for plans on this machine use " + _words(ratios))
        logger.info("after %d steps: %s", STEPS, "; ".join(lines))


def _words(ratios: dict[str, float]) -> str:
    names = {"time_ratio": "times", "memory_ratio": "memory"}
    return " and ".join(f"{ratio:.2f} x the estimated {names[name]}" for name, ratio in ratios.items())
