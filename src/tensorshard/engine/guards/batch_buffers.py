"""Finds buffers that a forward computes from its batch, so that each data rank has values of its own samples alone.

Codebooks that move with their batch, centres, ranges of quantization, queues of keys and the like are such buffers. On
one process they are of the whole batch. Batch norms are synchronized, and counters are the same on every rank.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_gather_into, all_reduce_
from tensorshard.comm.world import world
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.model.parameters import keeps_statistics
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.tensors import tensor_version

_ROUNDING = 1e-6  # the largest relative difference of checksums that is no difference
_CHUNK = 1 << 20
_MULTIPLIER, _PERIOD = 40_503, 65_536  # weights of a checksum: sums of counts are the same on every rank

_REMEDY = (
    "Each data rank took it from its own samples, and one process would take it from all of them. Sum over the data "
    "ranks what the forward takes from its batch, with ts.distributed.reduce(sums, group=engine.mesh.dp_group) or "
    "torch.distributed.all_reduce, or train with one data rank (dp_shard=1, with tp or pp)"
)


class BatchBuffers:
    """Compares, over the data ranks, the buffers that forwards have changed.

    It does so before the updates 1, 2, 4, 8 and so on. Buffers that are not persistent are a rank's own affair:
    checkpoints do not hold them either.
    """

    def __init__(self, sharded: ShardedModel, mesh: Mesh, device: torch.device) -> None:
        self._sharded = sharded
        self._mesh = mesh
        self._device = device
        self._names = list(sharded.persistent_buffers()) if mesh.dp_size > 1 else []
        self._laid_out = self._versions()
        self._values = self._checksums()
        self._before_stand_ins: dict[str, tuple[int, int]] | None = None

    def _versions(self) -> dict[str, tuple[int, int]]:
        if not self._names:
            return {}
        buffers = self._sharded.persistent_buffers()
        return {name: (id(buffers[name]), tensor_version(buffers[name])) for name in self._names if name in buffers}

    @torch.no_grad()
    def _checksums(self) -> dict[str, list[float]]:
        """Of each buffer: a write to ``buffer.data`` does not change its version."""
        buffers = self._sharded.persistent_buffers()
        named = {name: buffers[name] for name in self._names if name in buffers and not buffers[name].is_meta}
        if not named or self._is_fake():
            return {}
        rows = torch.stack([_checksum(buffer, self._device) for buffer in named.values()])
        return dict(zip(named, rows.tolist(), strict=True))

    def note_stand_ins(self) -> None:
        """Called before forwards in which a rank runs a sample that is not its own."""
        self._before_stand_ins = self._versions()

    @torch.no_grad()
    def check(self, taken: int) -> None:
        """Called before each update. A collective before some of them.

        Args:
            taken: how many optimizer steps there were so far.

        Raises:
            RuntimeError: on every rank, if data ranks have different values, or if a sample that stood in for none has
                a part in them.
        """
        stand_ins, self._before_stand_ins = self._before_stand_ins, None
        if self._mesh.dp_size == 1 or (taken & (taken + 1) and stand_ins is None) or self._is_fake():
            return
        message = self._stood_in(stand_ins) if stand_ins is not None else None
        if message is None and not taken & (taken + 1):
            message = self._different_buffer(taken)
        if self._mesh.degrees["pp"] > 1 and not taken & (taken + 1):
            message = self._of_any_stage(message)
        if message is not None:
            raise RuntimeError(message)

    def _is_fake(self) -> bool:
        group = self._mesh.dp_group
        return dist.get_backend(group) == "fake" or world().is_simulated

    def _changed(self, since: dict[str, tuple[int, int]]) -> list[str]:
        now = self._versions()
        return [name for name in self._names if now.get(name) != since.get(name)]

    def _described(self, name: str) -> str:
        path, _, own = name.rpartition(".")
        kind = type(self._sharded.structure.get_submodule(path)).__name__
        where = f"module {path!r}" if path else "the model"
        return f"{where} ({kind}) changes its buffer {own!r} in forward"

    def _stood_in(self, since: dict[str, tuple[int, int]]) -> str | None:
        buffers = self._sharded.persistent_buffers()
        statistics = {path for path, module in self._sharded.structure.named_modules() if keeps_statistics(module)}
        for name in self._changed(since):  # normalizations leave it out
            is_other = name in buffers and name.rpartition(".")[0] not in statistics
            if is_other and buffers[name].is_floating_point():
                return (
                    f"{self._described(name)}, and in this smaller last batch of the epoch some ranks ran a sample "
                    f"that is not their own, which may have a part in it: leave that batch out with "
                    f"engine.loader(drop_last=True)"
                )
        return None

    def _different_buffer(self, taken: int) -> str | None:
        if not self._names:
            return None
        values = self._checksums()
        written = {name for name, value in values.items() if value != self._values.get(name)}
        changed = written | set(self._changed(self._laid_out))
        mask = torch.tensor([float(name in changed) for name in self._names], device=self._device)
        all_reduce_(mask, self._mesh.dp_group, what="which buffers forwards changed")
        buffers = self._sharded.persistent_buffers()
        names = [name for name, count in zip(self._names, mask.tolist(), strict=True) if count]
        different = self._different([(name, buffers.get(name)) for name in names])
        if different is None:
            return None
        return (
            f"{self._described(different)}, and before update {taken + 1} the data ranks hold different "
            f"values of it. {_REMEDY}. A buffer that is meant to be each rank's own is registered with persistent=False"
        )

    def _different(self, named: Sequence[tuple[str, torch.Tensor | None]]) -> str | None:
        """The first of the tensors whose values differ between the data ranks. Every rank passes the same names."""
        if not named:
            return None
        rows = torch.stack([_checksum(tensor, self._device) for _, tensor in named])
        everyone = rows.new_empty((self._mesh.dp_size, *rows.shape))
        all_gather_into(everyone.view(-1), rows.view(-1), self._mesh.dp_group, what="buffers that forwards changed")
        sums, sizes = everyone.unbind(2)
        # Comparisons of NaN are false: ranks that all have NaN are no worse than one process.
        differs = sums.amax(0) - sums.amin(0) > _ROUNDING * sizes.amax(0)
        return next((name for (name, _), other in zip(named, differs.tolist(), strict=True) if other), None)

    def _of_any_stage(self, message: str | None) -> str | None:
        """The `message` of a stage, on the ranks of all stages."""
        flag = torch.tensor([float(message is not None)], device=self._device)
        all_reduce_(flag, self._mesh.world_group, what="whether forwards changed buffers")
        if not flag.item():
            return None
        messages: list[str | None] = [None] * self._mesh.world_group.size()
        dist.all_gather_object(messages, message, group=self._mesh.world_group)
        return next(said for said in messages if said is not None)


def _checksum(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A weighted sum of the elements, and the sum of their weighted sizes."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    if tensor is None or tensor.is_complex():
        tensor = torch.empty(0) if tensor is None else torch.view_as_real(tensor)
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        weights = torch.arange(1, len(chunk) + 1, device=chunk.device).mul_(_MULTIPLIER).remainder_(_PERIOD).double()
        weighted = chunk.double() * weights.div_(_PERIOD)
        total += torch.stack([weighted.sum(), weighted.abs().sum()]).to(device)
    return total
