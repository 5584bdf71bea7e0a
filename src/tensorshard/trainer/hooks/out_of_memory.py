"""What was held when memory ran out, and what would take less."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from tensorshard.comm.sharding import to_local
from tensorshard.common.quantities import size_text
from tensorshard.engine.engine import Engine
from tensorshard.predict.changes import milder
from tensorshard.trainer.hooks.hook import Hook

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer

_LINES = 5


class OutOfMemoryHook(Hook):
    """Adds to an error about memory what this rank held, by category, and the changes of the plan that take less.

    Args:
        global_batch_size: samples in a step, over all data ranks.
    """

    def __init__(self, global_batch_size: int) -> None:
        self._samples = global_batch_size

    def on_error(self, trainer: "Trainer", error: Exception) -> None:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError):
            return
        engine = trainer.engine
        held = held_by_category(engine)
        lines = [f"rank {engine.mesh.rank} ran out of memory in step {trainer.step + 1}; it held"]
        lines += [f"  {name:<22}{size_text(size):>10}" for name, size in held.items()]
        changes = milder(engine.plan, self._samples // engine.mesh.dp_size)[:_LINES]
        if changes:
            lines.append(
                "These changes of train.plan take less, the mildest first; `tensorshard estimate` says how much:"
            )
            lines += [f"  {words:<24}{cost}" for words, cost in changes]
        else:
            lines.append("More processes, a smaller batch or a smaller model would take less.")
        error.add_note("\n".join(lines))


def held_by_category(engine: Engine) -> dict[str, int]:
    """Bytes of this rank's tensors on its device. A failed step has dropped its gradients and activations.

    On a GPU their peak is what torch's allocator says, less the others.
    """
    masters = list(engine.sharded.masters().values())
    states = (value for state in engine.optimizer.state.values() for value in _tensors(state))
    held = {
        "parameters": _nbytes(masters, engine.device),
        "optimizer states": _nbytes(states, engine.device),
        "buffers": _nbytes(engine.sharded.model.buffers(), engine.device),
    }
    if engine.device.type == "cuda":
        rest = torch.cuda.max_memory_allocated(engine.device) - sum(held.values())
        held["gradients, activations"] = max(0, rest)
    return held


def _tensors(state: Any) -> Iterable[torch.Tensor]:
    return (value for value in state.values() if isinstance(value, torch.Tensor))


def _nbytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    return sum(local.nbytes for local in map(to_local, tensors) if local.device.type == device.type)
