"""Replicated parameters in buckets, whose gradients are reduced and whose updates are gathered together.

Also here: the averaging of one bucket's gradients over the data ranks.
"""

import os
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from tensorshard.comm.collectives import Started, all_reduce_several, reduce_scatter_several
from tensorshard.comm.world import world
from tensorshard.data_parallel.zero_parameter import ZeroParameter
from tensorshard.torch_private.coalescing import chunk_cat, unflatten
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.operators import foreach_mul_

ALONE_BYTES = 1 << 16
"""A tensor of at least this many bytes is sent by itself, without being copied into a packed message."""

LEAST_BYTES = 1 << 20
"""Units that follow each other travel together until they have this many bytes of parameters. What a message costs
does not depend on its size below that."""

DEBUG_VARIABLE = "TENSORSHARD_DEBUG_WEIGHTS"
"""Set to 1 in the environment, it fills weights with NaN until they have arrived, so that early reads show. ZeRO 3 then
gathers small units by themselves, too."""

MOST_BYTES = 4 << 30
"""Messages whose memory is given back when they are waited for take no more than this together, unless it is one."""

_IS_TRAINED = attrgetter("requires_grad")
Gradients = Mapping[ZeroParameter, torch.Tensor | None]


@dataclass(frozen=True)
class Gather:
    """Weights on their way from all ranks.

    Args:
        packed: parameters that travel in one message; the others arrive in their own memory.
        parts: that message, [ranks, chunks of `packed`]; None without one.
    """

    transfer: Started
    packed: list[ZeroParameter]
    parts: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that are given back when it is waited for."""
        return 0 if self.parts is None else self.parts.nbytes


class Bucket:
    """The parameters of one unit whose gradients go to the same ranks, and the state of their transfers."""

    def __init__(self, parameters: list[ZeroParameter]) -> None:
        self.parameters = parameters
        self.alone = [p for p in parameters if p.even and p.storage.nbytes >= ALONE_BYTES]
        self.packed = [p for p in parameters if p not in self.alone]
        self.packed_chunk = sum(p.chunk for p in self.packed)
        self.numel = sum(p.storage.numel() for p in parameters)
        self._all_flags: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.ready: set[ZeroParameter] = set()
        self.last: ZeroParameter | None = None  # whose gradient came last in a backward; None if not all came
        self._templates: list[torch.Tensor] | None = None
        self.gathering: list[Gather] = []
        self.update_pending = False  # an update of its master weights goes on, and forwards do not have it yet

    def unpacked(self, packed: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """This rank's part of the `packed` message: the gradients of its parameters, and the flags behind them."""
        if self._templates is None:
            one = packed.new_empty(())
            shapes = [*(p.message_shape for p in self.packed), (len(self.parameters) + 2,)]
            self._templates = [one.expand(shape) for shape in shapes]
        *gradients, flags = unflatten(packed, self._templates)
        return gradients, flags

    def flags(
        self, ranks: int, dtype: torch.dtype, missing: Collection[ZeroParameter], wrote: bool, differed: bool
    ) -> torch.Tensor:
        """[ranks, parameters + 2], all rows equal: 1 for each parameter that is not `missing`, whether this rank
        `wrote` parameters, and whether it `differed` from the order of units."""
        flags = self._all_flags.get((ranks, dtype))
        if flags is None:
            flags = torch.ones((ranks, len(self.parameters) + 2), dtype=dtype, device=self.parameters[0].storage.device)
            flags[:, -2:] = 0.0
            self._all_flags[ranks, dtype] = flags
        if missing or wrote or differed:
            flags = flags.clone()
            flags[:, -2] = float(wrote)
            flags[:, -1] = float(differed)
            for i, p in enumerate(self.parameters):
                if p in missing:
                    flags[:, i] = 0.0
        return flags


class Buckets:
    """The parameters that are trained now, a bucket for each unit. All others that are trained are in two more.

    Args:
        units: lists of modules whose parameters travel together.
        before_change: called before parameters move to other buckets.
        apart: parameters that count as in no unit, at ZeRO 3; None below.

    Attributes:
        computes: what forwards compute with, of all parameters.
        unit_of: the index of each parameter's bucket. Two follow each other for each unit: that of the parameters that
            all ranks hold, and that of its experts.
        in_units: the indices of the buckets of `units`.
        outside: the parameters in no unit.
        of_units: the buckets by these indices, in their order.
        trained: the same buckets.
        frozen: the parameters that are not trained.
        least_bytes: units that follow each other travel together until they have so many.
        bucket_of: the bucket of each trained parameter.
        backward_order: the buckets in the order in which gradients are reduced.
        launched: how many of these are reduced already in the backward that is running.
    """

    def __init__(
        self,
        parameters: Iterable[ZeroParameter],
        units: list[list[nn.Module]],
        before_change: Callable[[], None],
        *,
        apart: Container[nn.Parameter] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._apart = apart
        self.least_bytes = 0 if apart is not None and debugs_weights() else LEAST_BYTES
        self.in_units = range(2 * len(units))
        self._before_change = before_change
        self.computes = [p.compute for p in self._parameters]
        self._trained: list[bool] | None = None
        self.unit_of = self._assign(units)
        self.arrange()

    def _assign(self, units: list[list[nn.Module]]) -> dict[ZeroParameter, int]:
        """The index of each parameter's bucket, that of its unit or of an earlier one with which that is joined, where
        they are small. Two more units are for parameters in no unit: those before the first unit, and the others."""
        by_compute = {p.compute: p for p in self._parameters}
        unit_of: dict[ZeroParameter, int] = {}
        for index, unit in enumerate(units):
            for module in unit:
                for compute in module.parameters():
                    if compute in by_compute:
                        unit_of.setdefault(by_compute[compute], index)
        if self._apart is not None:
            unit_of = {p: unit for p, unit in unit_of.items() if p.compute not in self._apart}
        seen_unit = False
        for p in self._parameters:
            seen_unit = seen_unit or p in unit_of
            unit_of.setdefault(p, len(units) if seen_unit else -1)
        self.outside = {p for p, unit in unit_of.items() if not 0 <= unit < len(units)}
        if self._apart is not None:  # those in no unit are gathered at other times
            in_units = {p: unit for p, unit in unit_of.items() if p not in self.outside}
            first_of = _joined(in_units, self.least_bytes)
            first_of.update({-1: len(units), len(units): len(units)})
        else:
            first_of = _joined(unit_of, self.least_bytes)
        return {p: 2 * first_of[unit_of[p]] + p.is_expert for p in self._parameters}

    def arrange(self) -> None:
        """Fills the buckets with the parameters that are trained now, if these have changed."""
        with without_torch_functions_of_tensors():
            trained = list(map(_IS_TRAINED, self.computes))
        if trained == self._trained:
            return
        if self._trained is not None:
            self._before_change()
        self._trained = trained
        members: dict[int, list[ZeroParameter]] = {}
        frozen = []
        for p, is_trained in zip(self._parameters, trained, strict=True):
            if p.master is not p.compute:
                p.master.requires_grad_(is_trained)
            if is_trained:
                members.setdefault(self.unit_of[p], []).append(p)
            else:
                frozen.append(p)
        self.frozen = Bucket(frozen)
        self.of_units = {index: Bucket(members[index]) for index in sorted(members)}
        self.trained = list(self.of_units.values())
        self.bucket_of = {p: bucket for bucket in self.trained for p in bucket.parameters}
        self.backward_order = list(reversed(self.trained))  # backward meets the units last to first
        self.launched = 0

    def forward_order(self) -> list[Bucket]:
        """The buckets in the order in which forwards wait for them."""
        rest = [bucket for index, bucket in self.of_units.items() if index not in self.in_units]
        return [*rest, *(bucket for index, bucket in self.of_units.items() if index in self.in_units)]


def debugs_weights() -> bool:
    """Whether :data:`DEBUG_VARIABLE` is set."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


def _joined(unit_of: Mapping[ZeroParameter, int], least: int) -> dict[int, int]:
    """For each unit, the first of those that travel with it until they have at least so many bytes."""
    nbytes = dict.fromkeys(sorted(set(unit_of.values())), 0)
    for p, unit in unit_of.items():
        nbytes[unit] += p.storage.nbytes
    first_of: dict[int, int] = {}
    first, held = 0, least
    for unit in nbytes:
        if held >= least:
            first, held = unit, 0
        first_of[unit] = first
        held += nbytes[unit]
    return first_of


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
    def __init__(
        self,
        bucket: Bucket,
        gradients: Gradients,
        dtype: torch.dtype,
        scale: float,
        wrote: bool,
        differed: bool = False,
    ) -> None:
        self._groups, self.is_of_experts = bucket.parameters[0].groups, bucket.parameters[0].is_expert
        self._scale = scale
        self._differed = differed
        self.bucket = bucket
        self._missing = {p for p, gradient in gradients.items() if gradient is None}
        messages = [self._message_of(p, gradients[p], dtype) for p in bucket.alone]
        messages.append(self._pack(gradients, dtype, wrote))
        self._shards: Sequence[torch.Tensor] = messages
        self._between_replicas: Started | None = None
        self._messages: list[torch.Tensor] | None = None  # while the sum between replicas has yet to begin
        self._within_replica = self._start(messages)
        self.writers: torch.Tensor | None = None
        self.differed: torch.Tensor | None = None

    def _message_of(self, p: ZeroParameter, gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if gradient is None:
            gradient = _zeros(p)
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
                packed.append(p.chunked(_zeros(p) if gradient is None else gradient))
        if len({one.dtype for one in packed}) > 1:
            packed = [one.to(dtype) for one in packed]
        flags = bucket.flags(num_shards, packed[0].dtype if packed else dtype, self._missing, wrote, self._differed)
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
        self.writers, self.differed = flags[-2], flags[-1]
        absent = self._missing
        if absent and not world().is_simulated:  # simulated ranks use the same parameters
            counts = flags[:-2].tolist()
            absent = {p for p, count in zip(bucket.parameters, counts, strict=True) if count <= 0.0}
        for p, part in zip((*bucket.packed, *bucket.alone), (*parts, *alone), strict=True):
            if p not in absent:
                p.set_gradient(part)


def _zeros(p: ZeroParameter) -> torch.Tensor:
    return p.storage.new_zeros(p.compute.shape)


def _travelling(dtype: torch.dtype, requested: torch.dtype) -> torch.dtype:
    """The type in which gradients of `dtype` are summed: the requested one, except for fp64 models."""
    return dtype if dtype == torch.float64 else requested
