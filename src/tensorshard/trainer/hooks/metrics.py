"""Hooks that measure and log: losses, times, memory, and what was estimated beside what is measured."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tensorshard.comm.groups import world_group
from tensorshard.comm.primitives import exchange_sizes
from tensorshard.common.words import size_text
from tensorshard.predict import Estimate
from tensorshard.predict.hardware import save_ratios
from tensorshard.trainer.loggers.files import Logger
from tensorshard.trainer.memory import COMPARED_MEMORY, PeakMemory
from tensorshard.trainer.trainer import BatchSize, Hook, StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer


@dataclass(frozen=True)
class StepWork:
    """What a step computes, as the run's estimate has counted it.

    Args:
        flops: as :attr:`Estimate.model_flops`. peak: as :attr:`Estimate.peak_flops`.
        batch: size of the global batch that they were counted for.
    """

    flops: int
    peak: float | None
    batch: BatchSize


class _Span:
    """Sums over some steps: how many, what was in them, and their time."""

    def __init__(self, work: StepWork | None) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.samples = 0
        self.tokens: int | None = None
        self._work = work

    def add(self, seconds: float, batch: BatchSize) -> None:
        if self._work is not None and self._work.batch != batch:
            self._work = None  # its operations were counted for another size
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
        if self._work is not None and self._work.flops:
            rates["flops_per_second"] = self._work.flops * self.steps / self.seconds
            if self._work.peak:
                rates["mfu"] = rates["flops_per_second"] / self._work.peak
        return rates


class TimerHook(Hook):
    """Measures ``step_seconds``, ``samples_per_second`` and, for text, ``tokens_per_second``, over all ranks.

    Where the operations of a step were counted, also ``flops_per_second`` of all ranks, without recomputation, and
    ``mfu``: their share of what the devices reach at their peak.

    The clock runs while a batch is fetched and stepped, and stands still during evaluation, checkpoints and
    logging: put this hook first. The figures are means over the last `every` steps.

    Args:
        every: steps in a measurement. With the logging interval, each log line is a mean since the last one.
        clock: seconds of some monotonic clock.
        work: what a step computes, if that is known.
    """

    def __init__(
        self, every: int = 1, clock: Callable[[], float] = time.perf_counter, work: StepWork | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected at least 1 step.")
        self.every = every
        self._clock = clock
        self._work = work
        self._started = 0.0
        self._recent = _Span(work)
        self._whole = _Span(work)
        self._first_step_done = False

    def before_step(self, trainer: "Trainer") -> None:
        self._started = self._clock()

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        seconds = self._clock() - self._started
        if self._recent.steps == self.every:
            self._recent = _Span(self._work)
        self._recent.add(seconds, record.batch)
        if self._first_step_done:
            self._whole.add(seconds, record.batch)
        self._first_step_done = True
        record.metrics |= self._recent.rates()

    def overall(self) -> dict[str, float]:
        """Means over the whole run without its first step, which compiles and allocates."""
        return self._whole.rates() or self._recent.rates()


_GROWTH = 1.01  # factor by which a rank's peak grows before the peaks of all ranks are recorded again


class MemoryHook(Hook):
    """Records ``peak_memory_bytes``: this rank's peak since training began (see :class:`PeakMemory`).

    With several ranks, also ``peak_memory_bytes/rank0``, ``peak_memory_bytes/rank1`` and so on: the peaks of all ranks,
    on every rank. They are recorded at the first step that is logged, at the last one, and whenever one of them has
    grown by a hundredth since they were last recorded.

    Args:
        memory: of this process.
        every: steps between log lines; the ranks tell each other their peaks only at these steps.
    """

    def __init__(self, memory: PeakMemory, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected at least 1 step.")
        self.memory = memory
        self.every = every
        self._recorded: list[int] = []

    def before_train(self, trainer: "Trainer") -> None:
        self.memory.reset()

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        peak_bytes = self.memory.bytes()
        record.metrics["peak_memory_bytes"] = peak_bytes
        is_last = record.step == trainer.max_steps
        is_logged = record.step % self.every == 0 or record.step == 1 or is_last
        if not is_logged or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        peaks = exchange_sizes(peak_bytes, world_group(), torch.device("cpu"))  # on which nothing waits for a GPU
        before = self._recorded
        if is_last or not before or any(now > _GROWTH * then for now, then in zip(peaks, before, strict=True)):
            self._recorded = peaks
            record.metrics |= {f"peak_memory_bytes/rank{rank}": peak for rank, peak in enumerate(peaks)}


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
            metrics["grad_norm"] = trainer.engine.grad_norm
        returned = {name: value.item() for name, value in record.returned.items()}
        return returned | metrics | record.metrics | {"samples": trainer.samples_consumed}


logger = logging.getLogger("tensorshard")

STEPS = 10
"""After how many steps the comparison is made."""

COMPARED_SECONDS = 0.05
"""Estimated seconds of a step from which on they are compared. Below, the time of launching operators and of messages
is most of a step, and says nothing of larger models."""

_WARM_UP = 3  # steps that are slower: they allocate, and fill caches


class ExpectationHook(Hook):
    """After :data:`STEPS` steps, says what was estimated and what was measured on rank 0, and keeps the ratios.

    Memory is compared where it is large enough for libraries and connections not to be most of it, and time where a
    step is long enough for fixed costs not to be most of it.

    If the estimate was made with this machine's profile, the ratios go into that profile, for later searches. That of
    memory does if freed memory is not kept: where memory is scarce, a rank gives it back.

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
        if estimated is not None and estimated >= COMPARED_SECONDS:
            measured = statistics.median(self._seconds[_WARM_UP:])
            ratios["time_ratio"] = measured / estimated
            low, high = self._expected.step_span or (estimated, estimated)
            bounds = f"(between {low:.4g} and {high:.4g} s)"
            lines.append(f"a step was estimated to take {estimated:.4g} s, and takes {measured:.4g} s {bounds}")
        estimated_bytes = self._expected.ranks[0].peak_allocated
        measured_bytes = self._memory.bytes() - self._held_before
        if estimated_bytes >= COMPARED_MEMORY:
            if not keeps_freed_memory:
                ratios["memory_ratio"] = max(1.0, measured_bytes / estimated_bytes)
            lines.append(
                f"memory was estimated to be {size_text(estimated_bytes)} of live tensors, and is "
                f"{size_text(measured_bytes)} beyond the start"
                + ", with freed memory that is kept"
                * keeps_freed_memory
            )
        if ratios and hardware is not None and hardware.is_measured and save_ratios(**ratios) is not None:
            lines.append("later searches for plans on this machine use " + _words(ratios))
        if lines:
            logger.info("after %d steps: %s", STEPS, "; ".join(lines))


def _words(ratios: dict[str, float]) -> str:
    names = {"time_ratio": "times", "memory_ratio": "memory"}
    return " and ".join(f"{ratio:.2f} x the estimated {names[name]}" for name, ratio in ratios.items())
