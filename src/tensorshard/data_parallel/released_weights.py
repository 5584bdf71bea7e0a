"""ZeRO 3: whole parameters are in memory only while they are used.

A module keeps one parameter object for life. What its storage holds is given back after each use, and gathered again
from the master weights before the next one: before the forwards and backwards of its unit
(:mod:`tensorshard.data_parallel.unit_order`), and before any other code gets it, which a
:class:`~tensorshard.model.watched_parameters.Watch` sees. Graphs hold the parameter itself, or views of it, so they
find the values of the storage that was filled again. A gather is no change of the parameter: its version counts writes.
"""

from collections.abc import Collection, Container, Iterable
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

from tensorshard.comm.groups import CollectiveMismatchError
from tensorshard.common.never_compiled import never_compiled
from tensorshard.data_parallel.averaged_gradients import AveragesGradients
from tensorshard.data_parallel.buckets import Bucket
from tensorshard.data_parallel.published_weights import PublishedWeights, unpack
from tensorshard.data_parallel.written_values import fingerprint
from tensorshard.data_parallel.zero_parameter import Groups, ZeroParameter, note_published, written
from tensorshard.model.call_stack import users_line
from tensorshard.model.watched_parameters import METADATA, Pause, Watch, watch
from tensorshard.plan.storage import ParameterUnits
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.dtensor import shards_of
from tensorshard.torch_private.modules import own_parameters
from tensorshard.torch_private.operators import foreach_copy_
from tensorshard.torch_private.tensors import is_saved, object_attributes, storage_owners

_UNREAD = METADATA | {*object_attributes(), torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}


class State(Enum):
    """Of a unit's whole parameters."""

    RELEASED = auto()
    GATHERING = auto()
    HELD = auto()


class ReleasedUnit:
    """Parameters that are gathered together.

    Attributes:
        modules: whose forwards use them.
        parameters: those that are released; the others are whole on each rank.
        bucket: of all of them, trained or not.
        active: how many forwards of `modules` are running.
        outside: whether other code has read them since they were released.
        pinned: whether a graph of ``torch.func`` may hold them, of which nobody knows when its backward is over. They
            stay until the next update.
        is_small: they have at most `small` bytes, and stay between a forward and its backward.
    """

    def __init__(self, name: str, modules: list[nn.Module], parameters: list[ZeroParameter], small: int) -> None:
        self.name, self.modules = name, modules
        self.bucket = Bucket(parameters)
        self.parameters = [p for p in parameters if p.releases]
        self.is_small = sum(p.storage.nbytes for p in self.parameters) <= small
        self.shards: Any = None  # as they are read
        self.state = State.RELEASED if self.parameters else State.HELD
        self.active = 0
        self.outside = self.pinned = False
        self.pause = Pause(())
        self.is_paused = False


class ReleasedWeights(PublishedWeights):
    """See :class:`PublishedWeights`. Here an update only makes whole parameters outdated.

    Args:
        units: of all parameters, those in no module's unit first.
        shards: keeps this rank's part of each.
    """

    def __init__(
        self, parameters: Iterable[ZeroParameter], groups: Groups, units: list[ReleasedUnit], shards: ParameterUnits
    ) -> None:
        super().__init__(parameters, groups)
        self.units = units
        self._unit_of = {p: unit for unit in units for p in unit.parameters}
        self._outside: list[ReleasedUnit] = []
        self._prints: dict[ZeroParameter, torch.Tensor] = {}
        self._shards = shards
        for unit in units:
            watching = _Released(self, unit)
            for p in unit.parameters:
                watch(p.compute, watching)
            unit.pause = Pause(p.compute for p in unit.parameters)
            unit.shards = shards.unit(
                [p.master for p in unit.parameters],
                [p.place for p in unit.parameters],
                [p.storage.dtype for p in unit.parameters],
            )

    # -- gathers and releases --

    @never_compiled
    @torch.no_grad()
    def begin(self, unit: ReleasedUnit) -> None:
        """Begins to gather a unit that is released."""
        self._finish_update(unit)
        if unit.state is not State.RELEASED:
            return
        with without_torch_functions_of_tensors():
            for p in unit.parameters:
                p.make_room()
            with self._shards.read(unit.shards, is_in_backward()) as shards:
                foreach_copy_([p.mine_as_shard for p in unit.parameters], list(shards))
            self._gather(unit.bucket, f"the parameters of {unit.name}")
        unit.state = State.GATHERING

    @never_compiled
    @torch.no_grad()
    def need(self, unit: ReleasedUnit) -> None:
        """Returns when the parameters of `unit` are whole."""
        if unit.state is State.HELD and not self._awaiting_update:
            return
        self.begin(unit)
        if unit.state is State.HELD:
            return
        with without_torch_functions_of_tensors():
            for gather in unit.bucket.gathering:
                gather.transfer.wait()
                if gather.parts is not None:
                    unpack(gather.packed, gather.parts)
        unit.bucket.gathering.clear()
        unit.state = State.HELD
        for p in unit.parameters:
            p.is_awaited = False

    def hold(self, unit: ReleasedUnit) -> None:
        """As :meth:`need`, for the unit's own forward or backward, whose uses are not watched."""
        self.need(unit)
        if not unit.is_paused:
            unit.is_paused = True
            unit.pause.begin()

    def rest(self, unit: ReleasedUnit) -> None:
        """Watches the unit's parameters again, which stay."""
        if unit.is_paused:
            unit.is_paused = False
            unit.pause.end()

    def release(self, unit: ReleasedUnit) -> None:
        """Gives back the memory of whole parameters, unless somebody may use them."""
        if unit.state is State.RELEASED or unit.active:
            return
        self.rest(unit)
        if unit.pinned or not unit.parameters:
            return
        self.need(unit)
        self._adopt_unit(unit)
        if unit.outside and self._is_shown(unit):
            return
        self._drop(unit)

    def _is_shown(self, unit: ReleasedUnit) -> bool:
        """Whether other tensors show the memory, the user's or those of graphs, or graphs hold the parameter itself."""
        if not self._are_real:
            return False
        with without_torch_functions_of_tensors():
            return any(storage_owners(p.storage) > p.owners or is_saved(p.compute) for p in unit.parameters)

    def _drop(self, unit: ReleasedUnit) -> None:
        if unit in self._outside:
            self._outside.remove(unit)
        unit.outside = False
        if not unit.parameters:
            return
        for p in unit.parameters:
            p.is_awaited = True
            p.release()
        unit.state = State.RELEASED

    def read(self, unit: ReleasedUnit) -> None:
        """Called before code that is not the unit's own gets one of its parameters.

        Raises:
            CollectiveMismatchError: another rank did not read it, or has ended.
        """
        try:
            self.need(unit)
        except CollectiveMismatchError:
            raise CollectiveMismatchError(
                f"rank {dist.get_rank()} read a weight of {unit.name!r} at {users_line()}, and zero=3 gathers it from "
                f"all data ranks, but another rank did not read it there, or has ended: read weights on every rank, "
                f"and only print under `if rank == 0`. The process group is of no more use: end the processes"
            ) from None
        unit.outside = True
        if unit not in self._outside:
            self._outside.append(unit)

    def release_others(self, units: Container[ReleasedUnit]) -> None:
        """Releases what other code has read, but for `units`, which one function gets together."""
        if not is_in_backward():  # else all are released at its end
            for other in list(self._outside):
                if other not in units and not other.is_paused:
                    self.release(other)

    def release_read(self) -> None:
        """Releases what other code has read, and no longer needs."""
        for unit in list(self._outside):
            self.release(unit)

    def forget(self) -> None:
        """Called after a failed step."""
        for unit in self.units:
            for gather in unit.bucket.gathering:
                gather.transfer.abandon()
            unit.bucket.gathering.clear()
            unit.active, unit.pinned = 0, False
            self.rest(unit)
            if unit.state is State.GATHERING:
                self._drop(unit)
            self.release(unit)

    # -- updates --

    @torch.no_grad()
    def publish(self, bucket: Bucket, copied: Container[torch.Tensor] = ()) -> None:
        with without_torch_functions_of_tensors():
            for unit in {self._unit_of[p]: None for p in bucket.parameters if p in self._unit_of}:
                self._outdate(unit)
            copies = [p for p in bucket.parameters if p.is_copy and not p.releases and p.master not in copied]
            if copies:
                foreach_copy_([p.mine_as_shard for p in copies], shards_of(p.master for p in copies))
            if bucket.parameters and self._are_real:
                increment_version([p.compute for p in bucket.parameters])
            note_published(bucket.parameters)

    def _outdate(self, unit: ReleasedUnit) -> None:
        unit.pinned = False
        self.rest(unit)
        if unit.state is State.RELEASED or unit.active:
            return
        self.need(unit)
        shown = unit.outside and self._is_shown(unit)
        self._drop(unit)
        if shown:
            self.need(unit)
            unit.outside = True
            self._outside.append(unit)

    def wait(self, bucket: Bucket) -> None:
        """Waits for an update that goes on. Whole parameters are there when they are used."""
        if bucket.update_pending:
            self.publish_updated(bucket)

    def _finish_update(self, unit: ReleasedUnit) -> None:
        while self._awaiting_update and any(p.update_pending for p in unit.parameters):
            self.publish_updated(self._awaiting_update[0])

    # -- what user code writes --

    def _adopt_unit(self, unit: ReleasedUnit) -> None:
        if not self._are_real:
            return
        with without_torch_functions_of_tensors():
            for p in written(unit.parameters, in_backward=True):
                self._adopt(p)

    @torch.no_grad()
    def _adopt(self, p: ZeroParameter) -> bool:
        if p.releases and not p.is_awaited and self._groups.all is not None and written([p], in_backward=True):
            mine, known = fingerprint(p.compute), self._prints.get(p)
            self._prints[p] = mine if known is None else known + mine
        return super()._adopt(p)

    def _print_of(self, p: ZeroParameter) -> torch.Tensor:
        if not p.releases:
            return super()._print_of(p)
        return self._prints.pop(p, torch.zeros(2, dtype=torch.float64, device=p.storage.device))


class _Released(AveragesGradients):
    """Gathers a unit whose parameter code gets that is not the unit's own."""

    def __init__(self, weights: ReleasedWeights, unit: ReleasedUnit) -> None:
        super().__init__(weights.averaged_by_compute)
        self._weights, self._unit = weights, unit

    def before_call(self, function: Any, watches: Collection[Watch]) -> None:
        if function not in _UNREAD:
            self._weights.release_others({other._unit for other in watches if isinstance(other, _Released)})

    def before_use(self, parameter: nn.Parameter, function: Any) -> None:
        if function not in _UNREAD and not self._unit.is_paused:
            self._weights.read(self._unit)


def between_units(model: nn.Module, units: list[list[nn.Module]]) -> set[nn.Parameter]:
    """Parameters that several units have, or a unit and the model outside of it."""
    within = {module for unit in units for module in unit}
    visited: set[nn.Module] = set()
    seen: set[nn.Parameter] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in visited and module not in within:
            visited.add(module)
            seen |= set(own_parameters(module).values())
            waiting += module.children()
    shared: set[nn.Parameter] = set()
    for unit in units:
        own = {parameter for module in unit for parameter in module.parameters()}
        shared |= own & seen
        seen |= own
    return shared
