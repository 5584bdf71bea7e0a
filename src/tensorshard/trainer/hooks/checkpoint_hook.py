"""Checkpoints during training, and after it."""

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tensorshard.comm.sharding import to_local
from tensorshard.engine.engine import Engine, NonFiniteLossError
from tensorshard.trainer.hooks.hook import Hook
from tensorshard.trainer.run_directory import RunDirectory
from tensorshard.trainer.step_record import StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer

logger = logging.getLogger("tensorshard")


class CheckpointHook(Hook):
    """Saves every `every` steps and at the end, also at an early one; keeps the newest `keep` checkpoints.

    Put it last, so that what it saves is the state after all other hooks have seen the step.

    If the loss turns NaN or infinite, the engine raises before the update. The state from before that step is
    then saved, if its weights are finite, and nothing is deleted; the error says which checkpoint is the last
    good one.

    Args:
        directory: of the run.
        every: steps between checkpoints; 0 for one at the end alone.
        keep: checkpoints to keep, the newest ones; 0 for all.
    """

    def __init__(self, directory: RunDirectory, every: int, keep: int = 2) -> None:
        if every < 0:
            raise ValueError(f"every is {every}; expected a number of steps, or 0 for a checkpoint at the end alone.")
        if keep < 0:
            raise ValueError(f"keep is {keep}; expected a number of checkpoints, or 0 to keep all.")
        self.directory = directory
        self.every = every
        self.keep = keep

    def before_train(self, trainer: "Trainer") -> None:
        self._saved_step = trainer.step

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        if self.every and record.step % self.every == 0:
            self._save(trainer)
            self._delete_old(trainer.engine)

    def after_train(self, trainer: "Trainer") -> None:
        if trainer.step != self._saved_step:
            self._save(trainer)
            self._delete_old(trainer.engine)

    def on_error(self, trainer: "Trainer", error: Exception) -> None:
        # The loss is the global one, so this error is raised on every rank, and all of them may communicate
        # here.
        if not isinstance(error, NonFiniteLossError):
            return
        if trainer.step != self._saved_step and _weights_are_finite(trainer.engine):
            self._save(trainer)
        newest = self.directory.newest_checkpoint()
        if newest is None:
            error.add_note("No checkpoint was written before: there is nothing to go back to.")
        else:
            error.add_note(
                f"The last good checkpoint is {newest}; continue from it with --resume and "
                f"another learning rate, clipping or precision."
            )

    def _save(self, trainer: "Trainer") -> None:
        path = self.directory.checkpoint(trainer.step)
        trainer.engine.save(path, extra=trainer.state_dict())
        self._saved_step = trainer.step
        logger.info("saved checkpoint %s", path)

    def _delete_old(self, engine: Engine) -> None:
        if self.keep and engine.mesh.rank == 0:
            for step in self.directory.checkpoint_steps()[: -self.keep]:
                self.directory.delete_checkpoint(step)


def _weights_are_finite(engine: Engine) -> bool:
    """Whether every weight on every rank is. Collective."""
    local = (to_local(p) for p in engine.model.parameters())
    bad = sum((~torch.isfinite(p.detach())).sum().to(engine.device, torch.int64) for p in local)
    count = torch.as_tensor(bad, device=engine.device)
    if dist.is_initialized():
        dist.all_reduce(count)
    return not count.item()
