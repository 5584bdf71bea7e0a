"""The page of what the first steps hold, as they are measured."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from tensorshard.predict.estimate import Estimate
from tensorshard.predict.profile_memory import MemoryProfile, profile_memory
from tensorshard.torch_private.cuda_memory import recorded_cuda_memory
from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.step_record import StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer

logger = logging.getLogger("tensorshard")

STEPS = 2
"""How many are recorded: the first makes the optimizer's states, the second has them all the time."""


class MemoryProfileHook(Hook):
    """Records what the first steps of this run hold on each rank, and writes it to ``memory.html``.

    On GPUs each rank also writes ``memory-rank<r>.pickle``, CUDA's own snapshot, for https://pytorch.org/memory_viz.
    Steps are slower while they are recorded.

    Args:
        directory: for these files.
        estimate: to be shown beside what is measured, if there is one.
    """

    def __init__(self, directory: Path, estimate: Estimate | None = None) -> None:
        self.directory = directory
        self.estimate = estimate
        self._recording: ExitStack | None = None
        self._profile: MemoryProfile | None = None
        self._left = STEPS

    def before_step(self, trainer: "Trainer") -> None:
        if self._recording is None and self._left:
            self.directory.mkdir(parents=True, exist_ok=True)
            engine = trainer.engine
            self._recording = ExitStack()
            snapshot = self.directory / f"memory-rank{engine.mesh.rank}.pickle"
            self._recording.enter_context(recorded_cuda_memory(engine.device, snapshot))
            self._profile = self._recording.enter_context(profile_memory(engine))

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._write(trainer)

    def after_train(self, trainer: "Trainer") -> None:
        if self._recording is not None:  # fewer steps were left
            self._left = 0
            self._write(trainer)

    def close(self) -> None:
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def _write(self, trainer: "Trainer") -> None:
        """Collective: the fullest rank of each stage is shown."""
        self.close()
        assert self._profile is not None
        profiles: list[MemoryProfile] = [self._profile] * trainer.engine.mesh.world_size
        dist.all_gather_object(profiles, self._profile)
        if trainer.engine.mesh.rank == 0:
            page = self.directory / "memory.html"
            profiles[0].joined(profiles[1:]).to_html(page, self.estimate)
            logger.info("memory of the first steps: %s", page)
