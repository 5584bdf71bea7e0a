"""How much memory training takes."""

from typing import TYPE_CHECKING

from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.memory import PeakMemory
from tensorshard.trainer.step_record import StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer


class MemoryHook(Hook):
    """Records ``peak_memory_bytes``: this rank's peak since training began (see :class:`PeakMemory`)."""

    def __init__(self, memory: PeakMemory) -> None:
        self.memory = memory

    def before_train(self, trainer: "Trainer") -> None:
        self.memory.reset()

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        record.metrics["peak_memory_bytes"] = self.memory.bytes()
