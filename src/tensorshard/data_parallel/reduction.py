"""The averaging of one bucket's gradients over the data ranks."""

from collections.abc import Mapping, Sequence

import torch

from tensorshard.comm.coalescing import Started, all_reduce_several, reduce_scatter_several
from tensorshard.comm.world import world
from tensorshard.data_parallel.buckets import Bucket
from tensorshard.data_parallel.replicated_parameter import ReplicatedParameter
from tensorshard.torch_private.coalescing import chunk_cat
from tensorshard.torch_private.operators import foreach_mul_

Gradients = Mapping[ReplicatedParameter, torch.Tensor | None]


class Reduction:
    """The averaging of one bucket's gradients over the data ranks, under way.

    A parameter that had no gradient on any rank must end without one, as on one device. If another rank had one, it
    must end with that rank's share. So the packed message also counts, for each parameter, the ranks that had a
    gradient. A rank reads the count only of parameters for which it had none.

    Args:
        scale: a factor of the sums.
        wrote: whether user code of this rank has written parameters since the last update.

    Attributes:
        bucket: the bucket.
        writers: after :meth:`finish`, above 0 if `wrote` is true on some data rank that holds the parameters.
    """

    @torch.no_grad()
    def __init__(self, bucket: Bucket, gradients: Gradients, dtype: torch.dtype, scale: float, wrote: bool) -> None:
        self._groups, self.is_of_experts = bucket.parameters[0].groups, bucket.parameters[0].is_expert
        self._scale = scale
        self.bucket = bucket
        self._missing = {p for p, gradient in gradients.items() if gradient is None}
        messages = [self._message_of(p, gradients[p], dtype) for p in bucket.alone]
        messages.append(self._pack(gradients, dtype, wrote))
        self._shards: Sequence[torch.Tensor] = messages
        self._between_replicas: Started | None = None
        self._messages: list[torch.Tensor] | None = None  # while the sum between replicas has yet to begin
        self._within_replica = self._start(messages)
        self.writers: torch.Tensor | None = None

    def _message_of(self, p: ReplicatedParameter, gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if gradient is None:
            gradient = torch.zeros_like(p.compute)
        return gradient.to(_travelling(gradient.dtype, dtype)).contiguous().view(-1)

    def _pack(self, gradients: Gradients, dtype: torch.dtype, wrote: bool) -> torch.Tensor:
        """[ranks of the shard group, parts of the packed parameters, the counts and `wrote`], flattened."""
        bucket, num_shards = self.bucket, self._groups.num_shards
        for p in bucket.packed:
            dtype = _travelling(p.compute.dtype, dtype)
        packed = []
        for p in bucket.packed:
            gradient = gradients[p]
            if p.chunk:
                packed.append(p.chunked(torch.zeros_like(p.compute) if gradient is None else gradient))
        if len({one.dtype for one in packed}) > 1:
            packed = [one.to(dtype) for one in packed]
        flags = bucket.flags(num_shards, packed[0].dtype if packed else dtype, self._missing, wrote)
        message = flags.new_empty((num_shards, bucket.packed_chunk + flags.size(1)), dtype=dtype)
        chunk_cat([*packed, flags], num_shards, message)
        return message.view(-1)

    def _start(self, messages: list[torch.Tensor]) -> Started:
        """Starts the sums of `messages`. With hybrid sharding, those of the shards follow in :meth:`advance`, so that
        backward does not wait here."""
        groups = self._groups
        if groups.shard is None:
            assert groups.sum is not None
            return all_reduce_several(messages, groups.sum, what="gradients")
        self._shards = [message.new_empty(message.numel() // groups.num_shards) for message in messages]
        if groups.sum is not None:
            self._messages = messages
        return reduce_scatter_several(self._shards, messages, groups.shard, what="gradients")

    @torch.no_grad()
    def advance(self) -> None:
        """Starts the second half of transfers that have two."""
        self._within_replica.advance()
        if self._messages is not None:
            self._within_replica.wait()
            assert self._groups.sum is not None
            self._between_replicas = all_reduce_several(self._shards, self._groups.sum, what="gradients")
            self._messages = None
        if self._between_replicas is not None:
            self._between_replicas.advance()

    def abandon(self) -> None:
        """Ends it without a result."""
        self._within_replica.abandon()
        if self._between_replicas is not None:
            self._between_replicas.abandon()

    @torch.no_grad()
    def finish(self) -> None:
        """Waits, and hands each master its gradient."""
        self.advance()  # all second halves under way before the first is waited for
        (self._between_replicas or self._within_replica).wait()
        bucket = self.bucket
        *alone, packed = self._shards
        if self._scale != 1.0:
            foreach_mul_(list(self._shards), self._scale)
        parts, flags = bucket.unpacked(packed)
        self.writers = flags[-1]
        absent = self._missing
        if absent and not world().is_simulated:  # simulated ranks use the same parameters
            counts = flags[:-1].tolist()
            absent = {p for p, count in zip(bucket.parameters, counts, strict=True) if count <= 0.0}
        for p, part in zip((*bucket.packed, *bucket.alone), (*parts, *alone), strict=True):
            if p not in absent:
                p.set_gradient(part)


def _travelling(dtype: torch.dtype, requested: torch.dtype) -> torch.dtype:
    """The type in which gradients of `dtype` are summed: the requested one, except for fp64 models."""
    return dtype if dtype == torch.float64 else requested
