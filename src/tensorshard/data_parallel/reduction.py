"""Averaging the gradients of replicated parameters over the data ranks, a bucket of them at a time."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import advance, all_reduce_, finish_unasked, reduce_scatter_into
from tensorshard.comm.world import world
from tensorshard.data_parallel.replicated_parameter import ReplicatedParameter

ALONE_BYTES = 1 << 16
"""A tensor of at least this many bytes is sent by itself, without being copied into a packed message."""


@dataclass(frozen=True)
class Groups:
    """The groups over which gradients are averaged."""

    shard: dist.ProcessGroup | None  # each rank keeps a shard of the sum
    sum: dist.ProcessGroup | None  # each rank keeps all of it
    all: dist.ProcessGroup | None  # all data ranks; None for one alone
    data_ranks: int

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else self.shard.size()

    @property
    def communicate(self) -> bool:
        return self.data_ranks > 1


class Bucket:
    """The parameters of one unit, and the state of their transfers."""

    def __init__(self, parameters: list[ReplicatedParameter]) -> None:
        self.parameters = parameters
        self.alone = [p for p in parameters if p.even and p.storage.nbytes >= ALONE_BYTES]
        self.packed = [p for p in parameters if p not in self.alone]
        self.ready: set[ReplicatedParameter] = set()
        self.gathering: list[tuple[dist.Work, Any]] = []
        self.update_pending = False  # an update of its master weights goes on, and forwards do not have it yet


class Reduction:
    """The averaging of one bucket's gradients over the data ranks, under way.

    A parameter that had no gradient on any rank must end without one, as on one device. If another rank had one, it
    must end with that rank's share. So the packed message also counts, for each parameter, the ranks that had a
    gradient. A rank reads the count only of parameters for which it had none.

    Args:
        scale: a factor of the sums.
        wrote: whether user code of this rank has written parameters since the last update.

    Attributes:
        writers: after :meth:`finish`, above 0 if `wrote` is true on some data rank.
    """

    def __init__(
        self,
        bucket: Bucket,
        gradients: dict[ReplicatedParameter, torch.Tensor | None],
        groups: Groups,
        dtype: torch.dtype,
        scale: float,
        wrote: bool,
    ) -> None:
        self._groups = groups
        self._scale = scale
        self._bucket = bucket
        self._missing = {p for p, gradient in gradients.items() if gradient is None}
        self._alone: list[tuple[ReplicatedParameter, Any, torch.Tensor]] = []
        for p in bucket.alone:
            gradient = gradients[p]
            if gradient is None:
                gradient = torch.zeros_like(p.compute)
            message = gradient.to(_travelling(gradient.dtype, dtype)).contiguous()
            self._alone.append((p, *self._start(message.view(-1))))
        self._packed = self._start(self._pack(gradients, dtype, wrote))
        self.writers: torch.Tensor | None = None

    def _pack(
        self, gradients: dict[ReplicatedParameter, torch.Tensor | None], dtype: torch.dtype, wrote: bool
    ) -> torch.Tensor:
        """[ranks of the shard group, parts of the packed parameters, the counts and `wrote`], flattened."""
        bucket, num_shards = self._bucket, self._groups.num_shards
        for p in bucket.packed:
            dtype = _travelling(p.compute.dtype, dtype)
        chunk = sum(p.chunk for p in bucket.packed)
        message = torch.zeros(
            (num_shards, chunk + len(bucket.parameters) + 1), dtype=dtype, device=bucket.parameters[0].storage.device
        )
        offset = 0
        for p in bucket.packed:
            gradient = gradients[p]
            if gradient is not None:
                p.scatter_into(message[:, offset : offset + p.chunk], gradient)
            offset += p.chunk
        message[:, chunk:-1].fill_(1.0)
        if wrote:
            message[:, -1] = 1.0
        for i, p in enumerate(bucket.parameters):
            if gradients[p] is None:
                message[:, chunk + i] = 0.0
        return message.view(-1)

    def _start(self, message: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Starts the sum of `message`; returns the transfer and where this rank's shard of the sum will be."""
        groups = self._groups
        if groups.shard is None:
            assert groups.sum is not None
            return all_reduce_(message, groups.sum, async_op=True, what="gradients"), message
        shard = message.new_empty(message.numel() // groups.num_shards)
        work = reduce_scatter_into(shard, message, groups.shard, async_op=True, what="gradients")
        if groups.sum is not None:
            assert work is not None
            work.wait()
            work = all_reduce_(shard, groups.sum, async_op=True, what="gradients")
        return work, shard

    @torch.no_grad()
    def advance(self) -> None:
        """Starts the second half of transfers that have two."""
        for _, work, _ in self._alone:
            advance(work)
        advance(self._packed[0])

    def abandon(self) -> None:
        """Ends it without a result."""
        for work in (*(work for _, work, _ in self._alone), self._packed[0]):
            finish_unasked(work)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits, and hands each master its gradient."""
        self.advance()  # all second halves under way before the first is waited for
        bucket = self._bucket
        work, packed = self._packed
        work.wait()
        absent = self._missing
        if absent and not world().is_simulated:  # simulated ranks use the same parameters
            counts = packed[-1 - len(bucket.parameters) : -1].tolist()
            absent = {p for p, count in zip(bucket.parameters, counts, strict=True) if count < 0.5}
        if self._scale != 1.0:
            packed.mul_(self._scale)
        self.writers = packed[-1]
        offset = 0
        for p in bucket.packed:
            if p not in absent:
                p.set_gradient(packed[offset : offset + p.chunk])
            offset += p.chunk
        for p, work, shard in self._alone:
            work.wait()
            if self._scale != 1.0:
                shard.mul_(self._scale)
            if p not in absent:
                p.set_gradient(shard)


def _travelling(dtype: torch.dtype, requested: torch.dtype) -> torch.dtype:
    """The type in which gradients of `dtype` are summed: the requested one, except for fp64 models."""
    return dtype if dtype == torch.float64 else requested
