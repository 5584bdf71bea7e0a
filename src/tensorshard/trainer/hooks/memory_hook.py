"""How much memory training takes."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.memory import PeakMemory
from tensorshard.trainer.step_record import StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer

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
        own = self.memory.bytes()
        record.metrics["peak_memory_bytes"] = own
        is_last = record.step == trainer.max_steps
        is_logged = record.step % self.every == 0 or record.step == 1 or is_last
        if not is_logged or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        peaks = _of_all_ranks(own)
        before = self._recorded
        if is_last or not before or any(now > _GROWTH * then for now, then in zip(peaks, before, strict=True)):
            self._recorded = peaks
            record.metrics |= {f"peak_memory_bytes/rank{rank}": peak for rank, peak in enumerate(peaks)}


def _of_all_ranks(own: int) -> list[int]:
    """The number `own` of every rank, by rank. Collective; sent from the CPU, so that nothing waits for a GPU."""
    peaks = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(peaks, torch.tensor([own], dtype=torch.int64))
    return [int(peak) for peak in peaks]
