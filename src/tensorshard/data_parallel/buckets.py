"""Replicated parameters in buckets, whose gradients are reduced and whose updates are gathered together."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from tensorshard.comm.coalescing import Started
from tensorshard.data_parallel.replicated_parameter import ReplicatedParameter
from tensorshard.torch_private.coalescing import unflatten
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors

ALONE_BYTES = 1 << 16
"""A tensor of at least this many bytes is sent by itself, without being copied into a packed message."""

LEAST_BYTES = 1 << 20
"""Units that follow each other travel together until they have this many bytes of parameters. What a message costs
does not depend on its size below that."""

MOST_BYTES = 4 << 30
"""Messages whose memory is given back when they are waited for take no more than this together, unless it is one."""

_IS_TRAINED = attrgetter("requires_grad")


@dataclass(frozen=True)
class Gather:
    """Weights on their way from all ranks.

    Args:
        packed: parameters that travel in one message; the others arrive in their own memory.
        parts: that message, [ranks, chunks of `packed`]; None without one.
    """

    transfer: Started
    packed: list[ReplicatedParameter]
    parts: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that are given back when it is waited for."""
        return 0 if self.parts is None else self.parts.nbytes


class Bucket:
    """The parameters of one unit whose gradients go to the same ranks, and the state of their transfers."""

    def __init__(self, parameters: list[ReplicatedParameter]) -> None:
        self.parameters = parameters
        self.alone = [p for p in parameters if p.even and p.storage.nbytes >= ALONE_BYTES]
        self.packed = [p for p in parameters if p not in self.alone]
        self.packed_chunk = sum(p.chunk for p in self.packed)
        self.numel = sum(p.storage.numel() for p in parameters)
        self._all_flags: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.ready: set[ReplicatedParameter] = set()
        self.last: ReplicatedParameter | None = None  # whose gradient came last in a backward; None if not all came
        self._templates: list[torch.Tensor] | None = None
        self.gathering: list[Gather] = []
        self.update_pending = False  # an update of its master weights goes on, and forwards do not have it yet

    def unpacked(self, packed: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """This rank's part of the `packed` message: the gradients of its parameters, and the flags behind them."""
        if self._templates is None:
            one = packed.new_empty(())
            shapes = [*(p.message_shape for p in self.packed), (len(self.parameters) + 1,)]
            self._templates = [one.expand(shape) for shape in shapes]
        *gradients, flags = unflatten(packed, self._templates)
        return gradients, flags

    def flags(
        self, ranks: int, dtype: torch.dtype, missing: Collection[ReplicatedParameter], wrote: bool
    ) -> torch.Tensor:
        """[ranks, parameters + 1], all rows equal: 1 for each parameter that is not `missing`, and whether this rank
        `wrote` parameters."""
        flags = self._all_flags.get((ranks, dtype))
        if flags is None:
            flags = torch.ones((ranks, len(self.parameters) + 1), dtype=dtype, device=self.parameters[0].storage.device)
            flags[:, -1] = 0.0
            self._all_flags[ranks, dtype] = flags
        if missing or wrote:
            flags = flags.clone()
            flags[:, -1] = float(wrote)
            for i, p in enumerate(self.parameters):
                if p in missing:
                    flags[:, i] = 0.0
        return flags


class Buckets:
    """The parameters that are trained now, a bucket for each unit. All others that are trained are in two more.

    Args:
        units: lists of modules whose parameters travel together.
        before_change: called before parameters move to other buckets.

    Attributes:
        computes: what forwards compute with, of all parameters.
        unit_of: the index of each parameter's bucket. Two follow each other for each unit: that of the parameters that
            all ranks hold, and that of its experts.
        in_units: the indices of the buckets of `units`.
        outside: the parameters in no unit.
        of_units: the buckets by these indices, in their order.
        trained: the same buckets.
        frozen: the parameters that are not trained.
        bucket_of: the bucket of each trained parameter.
        backward_order: the buckets in the order in which gradients are reduced.
        launched: how many of these are reduced already in the backward that is running.
    """

    def __init__(
        self,
        parameters: Iterable[ReplicatedParameter],
        units: list[list[nn.Module]],
        before_change: Callable[[], None],
    ) -> None:
        self._parameters = list(parameters)
        self.in_units = range(2 * len(units))
        self._before_change = before_change
        self.computes = [p.compute for p in self._parameters]
        self._trained: list[bool] | None = None
        self.unit_of = self._assign(units)
        self.arrange()

    def _assign(self, units: list[list[nn.Module]]) -> dict[ReplicatedParameter, int]:
        """The index of each parameter's bucket, that of its unit or of an earlier one with which that is joined, where
        they are small. Two more units are for parameters in no unit: those before the first unit, and the others."""
        by_compute = {p.compute: p for p in self._parameters}
        unit_of: dict[ReplicatedParameter, int] = {}
        for index, unit in enumerate(units):
            for module in unit:
                for compute in module.parameters():
                    if compute in by_compute:
                        unit_of.setdefault(by_compute[compute], index)
        seen_unit = False
        for p in self._parameters:
            seen_unit = seen_unit or p in unit_of
            unit_of.setdefault(p, len(units) if seen_unit else -1)
        self.outside = {p for p, unit in unit_of.items() if not 0 <= unit < len(units)}
        first_of = _joined(unit_of)
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
        members: dict[int, list[ReplicatedParameter]] = {}
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


def _joined(unit_of: Mapping[ReplicatedParameter, int]) -> dict[int, int]:
    """For each unit, the first of those that travel with it: see :data:`LEAST_BYTES`."""
    nbytes = dict.fromkeys(sorted(set(unit_of.values())), 0)
    for p, unit in unit_of.items():
        nbytes[unit] += p.storage.nbytes
    first_of: dict[int, int] = {}
    first, held = 0, LEAST_BYTES
    for unit in nbytes:
        if held >= LEAST_BYTES:
            first, held = unit, 0
        first_of[unit] = first
        held += nbytes[unit]
    return first_of
