"""What user code writes into gathered parameters, or puts in their place, while a unit is gathered.

FSDP2 drops the gathered copies and keeps the shards. So writes to the copies are taken over to the shards; gathered
copies of shards that were written since are gathered again; and tensors that ``torch.func.functional_call`` puts in the
place of parameters stay there.

Also here: the comparison over the data ranks of what user code has written to parameters. It must be the same on all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.collectives import all_gather_into, all_reduce_
from tensorshard.comm.sharding import local_shard
from tensorshard.comm.world import world
from tensorshard.common.words import kind_of
from tensorshard.model.references import has_references, update_references
from tensorshard.model.watched_parameters import are_data_taken, forget_taken, note_data
from tensorshard.torch_private.dispatch import (
    WithoutTorchFunctions,
    transformed,
    without_torch_functions_of_tensors,
)
from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.fsdp import members, shard_version, sharded_parameter, unsharded_parameter
from tensorshard.torch_private.fsdp_calls import (
    gathered_parameters,
    groups_of_unit,
    is_unsharded,
    release_unit,
    shown_parameters,
)
from tensorshard.torch_private.modules import parameter_at, set_parameter
from tensorshard.torch_private.tensors import tensor_version


class UnitValues:
    """The values of units. Methods get the first of a unit's groups, which stands for it, or any group of FSDP2's.

    Attributes:
        written: notes what user code writes to gathered parameters; None for nothing.
    """

    def __init__(self) -> None:
        self.written: WrittenShards | None = None
        self._places: dict[Any, list[tuple[nn.Module, str, Any]]] = {}
        self._groups: dict[Any, tuple[Any, Any]] = {}  # by parameter
        self._noted: dict[Any, list[tuple[int, int, bool]]] = {}  # versions of the copy and the shard; if trained
        self._given: dict[Any, list[tuple[nn.Module, str, torch.Tensor]]] = {}
        self._followed: dict[Any, list[tuple[nn.Module, str, Any]]] = {}  # as the first; also held in other places

    def add(self, unit: Any) -> None:
        """Adds a unit."""
        for group in groups_of_unit(unit):
            self._places[group] = shown_parameters(group)
            followed = [(module, name, p) for module, name, p in self._places[group] if has_references(module, name)]
            if followed:
                self._followed[group] = followed
            self._groups.update({sharded_parameter(p): (group, p) for p in members(group)})

    def before_gather(self, unit: Any) -> None:
        """Called before a forward gathers the unit, or finds it gathered."""
        given: list[tuple[nn.Module, str, torch.Tensor]] = []
        for module, name, member in self._places_of(unit):
            shown = parameter_at(module, name)
            own = (sharded_parameter(member), unsharded_parameter(member))
            if shown is not None and shown is not own[0] and shown is not own[1]:
                if isinstance(transformed(shown), DTensor):
                    raise RuntimeError(
                        "torch.func differentiates by, or batches, parameters that zero=3 shards: give it whole ones, "
                        "{name: p.detach().full_tensor()} of engine.model.named_parameters(), or use zero=2"
                    )
                given.append((module, name, shown))
        if given:
            self._given[unit] = given
        else:
            self._given.pop(unit, None)
        if is_unsharded(unit) and any(self._was_written(group) for group in groups_of_unit(unit)):
            release_unit(unit)

    def _places_of(self, unit: Any) -> list[tuple[nn.Module, str, Any]]:
        return [place for group in groups_of_unit(unit) for place in self._places[group]]

    def after_gather(self, unit: Any) -> None:
        """Called when the unit is gathered for a forward."""
        self.show_copies(unit)
        self._show_given(unit)

    def given(self, unit: Any) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """The tensors that user code has put in the place of parameters: module, name, tensor."""
        return self._given.get(unit, [])

    def check_places(self) -> None:
        """Called before a backward, when ``torch.func.functional_call`` has put its own tensors away.

        Raises:
            RuntimeError: a parameter was replaced by another, which nothing would train.
        """
        for places in self._places.values():
            for module, name, member in places:
                shown = parameter_at(module, name)
                if shown is sharded_parameter(member) or shown is unsharded_parameter(member):
                    continue
                raise RuntimeError(
                    f"the parameter {name!r} of {kind_of(module)} was replaced after tensorshard.parallelize, "
                    f"which shards it and gave it to the optimizer: write into the one that was there, as by "
                    f"`with torch.no_grad(): parameter.copy_(value)`, or replace it before parallelize"
                )

    def show_copies(self, unit: Any, given: Sequence[tuple[nn.Module, str, torch.Tensor]] = ()) -> None:
        """Makes the modules compute with the gathered parameters, if there are any, and with `given` tensors."""
        if not is_unsharded(unit):
            return
        for group in groups_of_unit(unit):
            self._show_copies_of(group)
        for module, name, tensor in given:
            set_parameter(module, name, tensor)

    def _show_copies_of(self, group: Any) -> None:
        for module, name, member in self._places[group]:
            copy = unsharded_parameter(member)
            sharded: DTensor = sharded_parameter(member)
            if copy is not None and parameter_at(module, name) is sharded:
                set_parameter(module, name, copy)
                if copy.requires_grad != sharded.requires_grad:
                    copy.requires_grad_(sharded.requires_grad)
                    self._noted[group] = self._state(group)
        for module, name, member in self._followed.get(group, ()):
            update_references(module, name, sharded_parameter(member), unsharded_parameter(member))

    def show_shards(self, unit: Any) -> None:
        """Makes the modules show the sharded parameters, which the optimizer has, after a forward that keeps copies."""
        if is_unsharded(unit):
            for module, name, member in self._places_of(unit):
                if parameter_at(module, name) is unsharded_parameter(member):
                    set_parameter(module, name, sharded_parameter(member))
            for group in groups_of_unit(unit):
                self._follow_shards(group)
        self._show_given(unit)

    def _follow_shards(self, group: Any) -> None:
        for module, name, member in self._followed.get(group, ()):
            update_references(module, name, unsharded_parameter(member), sharded_parameter(member))

    def _show_given(self, unit: Any) -> None:
        for module, name, tensor in self.given(unit):
            set_parameter(module, name, tensor)

    def fresh_copy(self, parameter: Any) -> torch.Tensor | None:
        """The gathered copy of `parameter`, if there is one and it has the parameter's values."""
        group, member = self._groups[parameter]
        if not is_unsharded(group) or self._was_written(group):
            return None
        copy = unsharded_parameter(member)
        return copy if copy is not None and copy.requires_grad == parameter.requires_grad else None

    def gathered(self, group: Any) -> None:
        """Called when a group has been gathered."""
        if not world().is_simulated:
            copies = gathered_parameters(group)
            for copy in copies:
                note_data(copy)  # type: ignore[arg-type]
            forget_taken(copies)  # type: ignore[arg-type]
        self._noted[group] = self._state(group)

    def _state(self, group: Any) -> list[tuple[int, int, bool]]:
        return [
            (
                tensor_version(copy),
                shard_version(p) + _wrapper_version(sharded_parameter(p)),
                copy.requires_grad,
            )
            for p, copy in zip(members(group), gathered_parameters(group), strict=True)
        ]

    def _was_written(self, group: Any) -> bool:
        now, noted = self._state(group), self._noted.get(group)
        return noted is not None and any(n[:2] != before[:2] for n, before in zip(now, noted, strict=True))

    @torch.no_grad()
    def releasing(self, group: Any) -> None:
        """Called before the gathered parameters are dropped: takes over what was written to them."""
        self._follow_shards(group)
        for member, noted in zip(members(group), self._noted.pop(group, ()), strict=False):
            copy = unsharded_parameter(member)
            assert copy is not None
            sharded: DTensor = sharded_parameter(member)
            if copy.requires_grad != noted[2]:
                sharded.requires_grad_(copy.requires_grad)
            if tensor_version(copy) == noted[0] and not any(are_data_taken([copy])):  # type: ignore[list-item]
                continue
            if self.written is not None:
                self.written.note(sharded, copy)
            with without_torch_functions_of_tensors():
                local = sharded.to_local()
                part = local_shard(copy.detach(), sharded.device_mesh, sharded.placements).view(local.shape)
                _take_over(local, part.to(local.device))


def _take_over(local: torch.Tensor, part: torch.Tensor) -> None:
    """Gives `local` the values of `part`; where these are those of `local` rounded, it keeps its own."""
    if isinstance(local, FakeTensor):
        local.copy_(part)
        return
    if part.dtype == local.dtype:
        if not torch.equal(part, local):  # else it was only read
            local.copy_(part)
        return
    moved = local + (part.to(local.dtype) - local.to(part.dtype).to(local.dtype))
    moved = torch.where(moved.to(part.dtype) == part, moved, part.to(local.dtype))
    if not torch.equal(moved, local):
        local.copy_(moved)


def _wrapper_version(parameter: torch.Tensor) -> int:
    with WithoutTorchFunctions():
        return tensor_version(parameter)


@torch.no_grad()
def fingerprint(value: torch.Tensor) -> torch.Tensor:
    """[sum, norm] of a tensor, in fp64: equal on ranks that hold the same values."""
    value = value.detach()
    value = value if value.is_floating_point() else value.double()
    return torch.stack([value.sum(dtype=torch.float64), torch.linalg.vector_norm(value, dtype=torch.float64)])


def gather_flags(flags: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """For each of `flags`, whether it is true on some rank."""
    message = torch.tensor([float(flag) for flag in flags], device=device)
    all_reduce_(message, group, what="which parameters were written")
    return [number > 0 for number in message.tolist()]


def compare_fingerprints(names: Sequence[str], prints: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Compares the fingerprints of the parameters with these `names`, the same on every rank of `group`.

    Raises:
        RuntimeError: the ranks have different values of one. It names the first.
    """
    mine = torch.stack(list(prints))
    everyone = mine.new_empty((group.size(), *mine.shape))
    all_gather_into(everyone.view(-1), mine.view(-1), group, what="the parameters that were written")
    bits = everyone.view(torch.int64)  # NaN equals NaN
    differ = (bits != bits[:1]).any(dim=2).any(dim=0).tolist()
    for index, (name, different) in enumerate(zip(names, differ, strict=True)):
        if different:
            sums = [f"{value:.6g}" for value in everyone[:, index, 0].tolist()]
            raise RuntimeError(
                f"the data ranks have different values of the parameter {name!r}, which your code has written "
                f"since the last update (their sums by rank: {', '.join(sums)}): make the same write on every "
                f"rank, or write on one and call torch.distributed.broadcast(parameter, src=0). What a forward "
                f"computes from its batch is each data rank's own: sum it over them with ts.distributed.reduce(sums, "
                f"group=engine.mesh.dp_group) or torch.distributed.all_reduce"
            )


class WrittenShards:
    """What user code has written to parameters of which a rank holds shards, since the last comparison.

    Args:
        names: of the parameters.
        group: the data ranks.
        holders: the ranks that hold a parameter, by parameter, where these are not all data ranks.
    """

    def __init__(
        self,
        names: Mapping[Any, str],
        group: dist.ProcessGroup,
        device: torch.device,
        holders: Mapping[Any, dist.ProcessGroup],
    ) -> None:
        self._names, self._holders = dict(names), dict(holders)
        self._group, self._device = group, device
        self._prints: dict[Any, torch.Tensor] = {}
        self.compares = group.size() > 1

    def __bool__(self) -> bool:
        return bool(self._prints)

    def note(self, parameter: Any, *values: torch.Tensor) -> None:
        """Notes that `values`, of which every rank has all, were written to a `parameter`."""
        if not self.compares or parameter not in self._names:
            return
        for value in values:
            mine = fingerprint(value).to(self._device)
            known = self._prints.get(parameter)
            self._prints[parameter] = mine if known is None else known + mine

    def forget(self) -> None:
        """Drops what was noted."""
        self._prints.clear()

    def compare(self) -> None:
        """Called by all data ranks, if one of them has noted something.

        Raises:
            RuntimeError: the ranks wrote different values. It names the first parameter.
        """
        prints, self._prints = self._prints, {}
        parameters = list(self._names)
        written = gather_flags([p in prints for p in parameters], self._group, self._device)
        members = [p for p, flag in zip(parameters, written, strict=True) if flag]
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        for group in {id(group): group for group in (self._group, *self._holders.values())}.values():
            own = [p for p in members if self._holders.get(p, self._group) is group]
            if own:
                compare_fingerprints([self._names[p] for p in own], [prints.get(p, nothing) for p in own], group)
