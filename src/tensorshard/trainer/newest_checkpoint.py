"""Loads the newest checkpoint of a run that is not damaged, the same one on every rank."""

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tensorshard.comm.call_watch import is_of_collective
from tensorshard.comm.decisions import decide_once
from tensorshard.engine.engine import Engine
from tensorshard.trainer.start import Start
from tensorshard.weights.files.manifest import DamagedCheckpointError

logger = logging.getLogger("tensorshard")


def load_start(engine: Engine, start: Start) -> dict[str, Any]:
    """Loads what a run continues from; returns the ``extra`` that it was saved with. Collective.

    Unless the user named the checkpoint, a damaged one is renamed, a warning names its file, and the next older one is
    taken. That a checkpoint is damaged may be found as it is read, by one rank alone; the engine is then as it was.

    Raises:
        DamagedCheckpointError: it is the one that the user named, or there is no older one.
    """
    checkpoint, directory, group = start.checkpoint, start.directory, engine.mesh.world_group
    assert checkpoint is not None
    if not start.named:
        _warn(decide_once(directory.set_aside_damaged, group))
    while True:
        error: Exception | None = None
        try:
            return _on_all_ranks(engine, checkpoint)
        except DamagedCheckpointError as damage:
            error = damage
        if start.named or directory.step_of(checkpoint) is None:
            raise error

        def pass_over(damaged: Path | str = checkpoint, why: str = str(error)) -> tuple[Path | str, str] | None:
            others = [step for step in directory.checkpoint_steps() if directory.checkpoint(step) != damaged]
            if not others:
                return None
            said = directory.set_aside(damaged, why)
            newest = directory.newest_checkpoint()
            return None if newest is None else (newest, said)

        found = decide_once(pass_over, group)
        if found is None:
            raise error
        checkpoint, said = found
        _warn([said])


def _on_all_ranks(engine: Engine, checkpoint: Path | str) -> dict[str, Any]:
    """``engine.load(checkpoint)``, which raises a DamagedCheckpointError on all ranks if it does so on one."""
    error: Exception | None = None
    extra: dict[str, Any] = {}
    try:
        extra = engine.load(checkpoint)
    except (ValueError, RuntimeError, OSError) as failure:
        if is_of_collective(failure):
            raise
        error = failure
    damage = str(error) if isinstance(error, DamagedCheckpointError) else None
    everyone: list[Any] = [damage]
    if engine.mesh.world_size > 1:
        everyone = [None] * engine.mesh.world_size
        dist.all_gather_object(everyone, damage, group=engine.mesh.world_group)
    damages = [said for said in everyone if said is not None]
    if damages:
        raise DamagedCheckpointError(damages[0]) from error
    if error is not None:
        raise error
    return extra


def _warn(sentences: list[str]) -> None:
    for sentence in sentences:
        logger.warning("%s", sentence)
