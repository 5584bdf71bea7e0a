"""How fast training goes."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.step_record import BatchSize, StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer


class _Span:
    """Sums over some steps: how many, what was in them, and their time."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.samples = 0
        self.tokens: int | None = None

    def add(self, seconds: float, batch: BatchSize) -> None:
        self.steps += 1
        self.seconds += seconds
        self.samples += batch.samples
        if batch.tokens is not None:
            self.tokens = (self.tokens or 0) + batch.tokens

    def rates(self) -> dict[str, float]:
        if not self.steps or self.seconds <= 0:
            return {}
        rates = {
            "step_seconds": self.seconds / self.steps,
            "samples_per_second": self.samples / self.seconds,
        }
        if self.tokens is not None:
            rates["tokens_per_second"] = self.tokens / self.seconds
        return rates


class TimerHook(Hook):
    """Measures ``step_seconds``, ``samples_per_second`` and, for text, ``tokens_per_second``, over all ranks.

    The clock runs while a batch is fetched and stepped, and stands still during evaluation, checkpoints and
    logging: put this hook first. The figures are means over the last `every` steps.

    Args:
        every: steps in a measurement. With the logging interval, each log line is a mean since the last one.
        clock: seconds of some monotonic clock.
    """

    def __init__(self, every: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected at least 1 step.")
        self.every = every
        self._clock = clock
        self._started = 0.0
        self._recent = _Span()
        self._whole = _Span()
        self._first_step_done = False

    def before_step(self, trainer: "Trainer") -> None:
        self._started = self._clock()

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        seconds = self._clock() - self._started
        if self._recent.steps == self.every:
            self._recent = _Span()
        self._recent.add(seconds, record.batch)
        if self._first_step_done:
            self._whole.add(seconds, record.batch)
        self._first_step_done = True
        record.metrics |= self._recent.rates()

    def overall(self) -> dict[str, float]:
        """Means over the whole run without its first step, which compiles and allocates."""
        return self._whole.rates() or self._recent.rates()
