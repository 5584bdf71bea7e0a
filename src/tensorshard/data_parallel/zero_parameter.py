"""A parameter that every rank holds in full, and of which each rank may update a shard.

Also here: the ranks over which a parameter's gradients are summed, and those over which its state is sharded.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tensorshard.comm.collectives import all_gather_into
from tensorshard.comm.sharding import on_mesh_device
from tensorshard.data_parallel.sharded_parameter import read_as_full
from tensorshard.model.parameters import like
from tensorshard.model.watched_parameters import are_data_taken, forget_taken, held_gradient, note_data
from tensorshard.passes.precision import compute_dtype, held_dtype, master_dtype
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.storage import MasterPlace, ParameterUnits, Storage, TakeGradient
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.dtensor import dtensor_laid_out_as, dtensor_of, shard_of
from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.tensors import storage_owners, tensor_version, tensor_versions


@dataclass(frozen=True)
class Groups:
    """The groups over which gradients are averaged."""

    mesh: DeviceMesh | None  # over which shards are kept
    shard: dist.ProcessGroup | None  # each rank keeps a shard of the sum
    sum: dist.ProcessGroup | None  # each rank keeps all of it
    all: dist.ProcessGroup | None  # all ranks that hold the parameter; None for one alone
    ranks: int  # that have different samples
    releases: bool = False  # whether whole parameters are in memory only while they are used (ZeRO 3)

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else self.shard.size()

    @property
    def communicate(self) -> bool:
        return self.ranks > 1


def shard_layout(mesh: Mesh, level: int) -> Groups:
    """The groups of the parameters that all data ranks hold."""
    ranks = mesh.gradient_ranks
    if level == 0 or mesh.shard_size == 1:
        everyone = mesh.gradient_group if ranks > 1 else None
        return Groups(None, None, everyone, everyone, ranks)
    return _sharded(mesh, ranks, level)


def expert_layout(mesh: Mesh, level: int) -> Groups:
    """The groups of the parameters of experts, which some of the data ranks hold.

    Each rank's gradient has the terms of the samples of all ranks that share the experts, so what is left to sum is
    over the others. At level 1 and 2 there is a shard even where one rank holds them alone, because the other
    parameters have one.
    """
    if level == 0:
        everyone = mesh.experts.gradient_group
        return Groups(None, None, everyone, everyone, mesh.gradient_ranks)
    return _sharded(mesh.experts, mesh.gradient_ranks, level)


def _sharded(mesh: Mesh, ranks: int, level: int) -> Groups:
    replicate = mesh.group("dp_replicate") if mesh.degrees["dp_replicate"] > 1 else None
    return Groups(mesh.shard_mesh, mesh.shard_group, replicate, mesh.gradient_group, ranks, releases=level == 3)


class ZeroParameter:
    """One parameter: what forward computes with, and the part of it that this rank updates.

    Args:
        groups: the ranks that hold it.
        is_expert: whether the other data ranks hold other experts in its place.
        storage: where master weights are kept that forwards do not compute with.
        units: keeps those of parameters that are whole only while they are used.

    Attributes:
        releases: whether `compute` has memory only while it is used. It has none when this returns.
        compute: the module's parameter, full and plain. Forwards compute with it.
        master: the part that this rank's optimizer updates: a DTensor if it is a shard; `compute` itself if that is it.
        shard: this rank's part in the memory of `master`.
        is_copy: whether `compute` is a copy of the master weight, of another type or in other memory. Else `master` is
            a view of it.
        is_awaited: whether other ranks' parts of the last update have yet to arrive.
        update_pending: whether the last update goes on in the background.
        place: of `shard`.
        rows: the memory of `compute` with its padding, [num_shards, chunk]: row r is what rank r updates.
        mine: this rank's row. `mine_as_shard` is the same without `padding`, in the shape of `shard`.
        averaged: the gradient that a reduction left in `compute`; None if there is none.
        given: a gradient that user code has set, of a type that `compute` cannot hold; None if there is none.
        published: the versions of `compute` and `shard` when both had the same values last.
        address: of the memory of `compute`, unless user code has given it other memory.
        owners: how many tensors show the memory of `compute`, without those of user code.
    """

    def __init__(
        self,
        name: str,
        value: torch.Tensor,
        template: nn.Parameter,
        precision: str,
        groups: Groups,
        is_expert: bool,
        storage: Storage,
        units: ParameterUnits,
    ) -> None:
        self.name, self.groups, self.is_expert = name, groups, is_expert
        shard_mesh = groups.mesh
        self.place = MasterPlace()
        self.take_gradient: TakeGradient | None = None
        self.finish_gradients: Callable[[], None] | None = None
        self.num_shards = 1 if shard_mesh is None or value.dim() == 0 else shard_mesh.size()
        index = 0 if self.num_shards == 1 else shard_mesh.get_local_rank()  # type: ignore[union-attr]
        wide, narrow = _types(template, precision)
        rows = value.size(0) if value.dim() else 1
        self.chunk_rows = -(-rows // self.num_shards)
        row = value[0].numel() if value.dim() and rows else 1
        self.chunk = self.chunk_rows * row
        self.even = self.chunk * self.num_shards == value.numel()

        self.storage = torch.zeros(self.chunk * self.num_shards, dtype=narrow, device=value.device)
        self.releases = groups.releases and self.num_shards > 1 and self.chunk > 0
        full = self.storage[: value.numel()].view(value.shape)
        full.copy_(value)
        # A gather writes into the storage while graphs hold `compute`, which then has a version of its own.
        self.compute = like(template, full.data if self.releases else full)
        self.own = slice(index * self.chunk, (index + 1) * self.chunk)
        # The host updates all master weights in its memory, those of 16-bit parameters and others.
        on_host = storage.masters_on_host and value.dim() > 0 and template.requires_grad
        self.is_copy = narrow != wide or on_host or self.releases
        self.index = index
        self.is_awaited = self.update_pending = False
        self.averaged: torch.Tensor | None = None
        self.given: torch.Tensor | None = None
        self._whole: tuple[torch.Tensor, int, int] | None = None  # the full gradient, with versions of it and the shard
        self._group = None if shard_mesh is None else shard_mesh.get_group()
        self.published = (0, 0)
        self.address = _address(self.storage)
        self.owners = 0
        first = min(index * self.chunk_rows, rows)
        mine = slice(first, min(first + self.chunk_rows, rows))
        self._shard_shape = full[mine].shape if value.dim() else value.shape
        self._view_rows()
        if shard_mesh is None and not self.is_copy:
            self.master = self.shard = self.compute
            return
        self._make_master(value, template, wide, mine, storage, units)
        if self.releases:
            self.release()
            self.is_awaited = True

    def _make_master(
        self,
        value: torch.Tensor,
        template: nn.Parameter,
        dtype: torch.dtype,
        mine: slice,
        storage: Storage,
        units: ParameterUnits,
    ) -> None:
        """Makes the part that this rank updates, of `dtype`: the rows `mine` of `value`."""
        full = self.storage[: value.numel()].view(value.shape)
        if not self.is_copy:
            local = (full[mine] if value.dim() else full).data  # with a version of its own, unlike a view
        else:
            local = (value[mine] if value.dim() else value).to(dtype)
            if self.releases:
                local, self.place = units.keep(local)
            else:
                local, self.place = storage.keep_master(local, self.mine[: local.numel()])
        if self.num_shards > 1:
            assert self.groups.mesh is not None
            shard: Any = dtensor_of(local, self.groups.mesh, [Shard(0)], value.shape, full.stride())
            self.master = like(template, shard)
        else:
            self.master = like(template, local)
        self.shard = shard_of(self.master)

    @property
    def is_rounded(self) -> bool:
        """Whether `compute` has fewer digits than the master weight."""
        return self.storage.dtype != self.shard.dtype

    def release(self) -> None:
        """Gives back the memory of `compute`, which stays the same tensor."""
        if not self.storage.untyped_storage().resizable():  # NumPy shares it, and keeps it
            full = self.compute.detach()
            self.storage = torch.empty_like(self.storage)
            self._view_rows()
            self.compute.data = self.storage[: full.numel()].view(full.shape).data
            del full
            self.count_owners()
        self.storage.untyped_storage().resize_(0)

    def make_room(self) -> None:
        """Takes memory for `compute` again, and puts this rank's part of the master there."""
        self.storage.untyped_storage().resize_(self.storage.numel() * self.storage.element_size())
        self.address = _address(self.storage)
        if self.padding.numel():  # what is sent of it is the same each time
            self.padding.zero_()

    def count_owners(self) -> None:
        """Notes how many tensors show the memory now, before user code can."""
        self.owners = 0 if isinstance(self.storage, FakeTensor) else storage_owners(self.storage)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a master or of its gradient."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @property
    def message_shape(self) -> torch.Size:
        """The shape of this rank's part of the gradient in a message: with its padding it is flat."""
        is_full = self._shard_shape.numel() == self.chunk
        return self._shard_shape if is_full else torch.Size((self.chunk,))

    def _view_rows(self) -> None:
        self.rows = self.storage.view(self.num_shards, self.chunk)
        self.mine = self.storage[self.own]
        self.mine_as_shard = self.mine[: self._shard_shape.numel()].view(self._shard_shape)
        # Not in make_room, as engine.replay compares what operators return, and memory is not set there yet.
        self.padding = self.mine[self._shard_shape.numel() :]

    def chunked(self, gradient: torch.Tensor) -> torch.Tensor:
        """The full `gradient` as a tensor whose chunk r, along its first dimension, is what rank r will keep."""
        if gradient.dim():
            return gradient
        return gradient.view(1).expand(self.groups.num_shards)  # not sharded: every rank keeps all of it

    # -- values --

    def forget_other_parts(self) -> None:
        """Fills the other ranks' parts with NaN, which are about to arrive."""
        if self.num_shards > 1 and self.storage.is_floating_point():
            self.rows[: self.index].fill_(torch.nan)
            self.rows[self.index + 1 :].fill_(torch.nan)

    def take_over(self, *, keep_master: bool) -> None:
        """Gives the master weight what user code wrote to `compute`. Elements that it left are as exact as before.

        Args:
            keep_master: the master was written as well, and keeps its values.

        Raises:
            RuntimeError: `compute` was given more memory than it has.
        """
        if _address(self.compute) != self.address:
            self._move()
            self.count_owners()
        if not self.is_copy or keep_master:
            return
        shard = self.local(self.master)
        mine = self.mine_as_shard.to(shard.device)
        # The master moves by as much as `compute` did, and so keeps the digits that `compute` does not have, as where a
        # perturbation is added and taken back. Where it would then be rounded to another value, it gets what was
        # written.
        moved = shard + (mine.to(shard.dtype) - shard.to(mine.dtype).to(shard.dtype))
        shard.copy_(torch.where(moved.to(mine.dtype) == mine, moved, mine.to(shard.dtype)))

    @torch.no_grad()
    def set_master(self, value: torch.Tensor) -> None:
        """Gives a master weight that is a copy this rank's part of the full `value`, which `compute` may round."""
        if self.is_copy:
            first = self.index * self.chunk_rows
            self.shard.copy_(value if self.num_shards == 1 else value[first : first + self.shard.size(0)])

    def _move(self) -> None:
        """Takes values that user code gave as other memory (``p.data = values``). The memory before keeps its own, as
        user code may give that back."""
        given = self.compute.detach()
        numel = given.numel()
        if numel > self.storage.numel():
            raise RuntimeError(
                f"the parameter {self.name!r} was given other memory (p.data = ...) of {numel} elements, and the plan "
                f"laid it out with {self.storage.numel()}: copy values into it with p.copy_(values) under "
                f"torch.no_grad()"
            )
        self.storage = torch.zeros_like(self.storage)
        self._view_rows()
        full = self.storage[:numel].view(given.shape)
        full.copy_(given)
        self.compute.data = full
        if self.shard is not self.compute and not self.is_copy:
            self.shard.data = self.mine_as_shard
        self.address = _address(self.storage)

    # -- gradients --

    @torch.no_grad()
    def shown_gradient(self) -> torch.Tensor | None:
        """What user code sees as the gradient of `compute`, which holds none: one that it has set, or the averaged one.

        It is whole. A collective if it is sharded and was not gathered before.
        """
        if self.given is not None:
            return self.given
        gradient = self.master.grad
        if gradient is None or self.num_shards == 1:
            return gradient
        local = self.local(gradient)
        if self._whole is not None and self._whole[2] == tensor_version(local):
            return self._whole[0]
        assert self._group is not None
        numel = self.compute.numel()
        full = local.new_zeros(self.chunk * self.num_shards)
        full[self.own][: local.numel()].copy_(local.reshape(-1))
        all_gather_into(full, full[self.own].clone(), self._group, what=f"the gradient of {self.name}")
        shown = full[:numel].view(self.compute.shape)
        self._whole = (shown, tensor_version(shown), tensor_version(local))
        return shown

    @torch.no_grad()
    def take_back_gradient(self) -> None:
        """Takes over what user code wrote to the gradient that :meth:`shown_gradient` gave it."""
        if self._whole is None or self.master.grad is None:
            return
        shown, version, _ = self._whole
        if tensor_version(shown) == version:
            return
        local = self.local(self.master.grad)
        first = self.index * self.chunk
        local.copy_(shown.reshape(-1)[first : first + local.numel()].view(local.shape))
        self._whole = (shown, tensor_version(shown), tensor_version(local))

    def forget_gradient(self) -> None:
        """Drops the averaged gradient."""
        self.master.grad = None
        self._whole = self.averaged = self.given = None

    def give_gradient(self, gradient: torch.Tensor | None) -> bool:
        """Called where user code sets the gradient of `compute`. Returns whether `compute` need not hold it."""
        if gradient is not None and gradient is self.shown_gradient():  # as in p.grad *= 2
            return True
        self.forget_gradient()
        if gradient is None or gradient.dtype == self.compute.dtype:
            return False
        self.given = gradient
        return True

    def has_given_gradient(self, communicate: bool) -> bool:
        """Whether `compute` has a gradient that is this rank's alone, which user code has set.

        Args:
            communicate: whether there are other data ranks.
        """
        if self.given is not None:
            return True
        held = held_gradient(self.compute)
        return held is not None and held is not self.averaged and (communicate or self.master is not self.compute)

    def sum_given_gradient(self) -> None:
        """Makes the gradient that user code has set, the mean over the ranks that share an expert, their sum."""
        sharing = self.groups.ranks // (1 if self.groups.all is None else self.groups.all.size())
        gradient = held_gradient(self.compute) if self.given is None else self.given
        if sharing > 1 and gradient is not None:
            gradient.mul_(sharing)

    def set_gradient(self, part: torch.Tensor) -> None:
        """Adds `part`, this rank's shard of the averaged gradient with its padding, to the master's gradient."""
        shard = part
        if part.shape != self._shard_shape:
            numel = self._shard_shape.numel()
            shard = (part if part.numel() == numel else part[:numel]).view(self._shard_shape)
        if not self.place.holds_gradients:
            assert self.take_gradient is not None
            self.take_gradient(self.master, shard)
            return
        if shard.dtype != self.shard.dtype or shard.device != self.shard.device:
            shard = shard.to(self.shard.device, self.shard.dtype)
        if self.master.grad is not None:
            self.take_back_gradient()
            if self.finish_gradients is not None:
                self.finish_gradients()
            self.local(self.master.grad).add_(shard)
        elif self.num_shards > 1:
            self.master.grad = dtensor_laid_out_as(shard, self.master)  # type: ignore[arg-type]
        else:
            self.master.grad = shard
        if self.take_gradient is not None:
            self.take_gradient(self.master)
        if self.master is self.compute:
            self.averaged = self.master.grad


def _types(parameter: nn.Parameter, precision: str) -> tuple[torch.dtype, torch.dtype]:
    """The types of the master weight and of what forwards compute with."""
    narrow = compute_dtype(master_dtype(parameter.dtype), precision)
    wide = held_dtype(parameter)
    if not parameter.requires_grad and torch.promote_types(wide, narrow) == narrow:
        wide = narrow  # what computes has all its digits, so that one copy is enough
    return wide, narrow


def show_master(p: ZeroParameter) -> None:
    """Makes the master weight of `p`, which code finds in the optimizer's groups, one that is read in full."""
    if isinstance(p.master, DTensor):
        read_as_full(p.master, _MasterReader(p))
    else:
        note_data(p.master, p.name)


class _MasterReader:
    """What a master weight asks of the parameter that forwards compute with."""

    def __init__(self, parameter: ZeroParameter) -> None:
        self._parameter = weakref.ref(parameter)

    def read(self, parameter: DTensor) -> torch.Tensor:
        """The full master, without a graph: no forward computes with it. A collective."""
        with torch.no_grad(), without_torch_functions_of_tensors():
            return on_mesh_device(parameter.detach()).full_tensor()  # type: ignore[arg-type]

    def set_gradient(self, parameter: DTensor, gradient: torch.Tensor) -> None:
        """Notes this rank's full `gradient`, as one that was given to what forwards compute with."""
        known = self._parameter()
        if known is not None:
            known.compute.grad = gradient


def note_published(parameters: Sequence[ZeroParameter]) -> None:
    """Notes that `compute` and the master of each have the same values now."""
    with without_torch_functions_of_tensors():
        computes = [p.compute for p in parameters]
        # Operations on a DTensor count as changes of it alone, and those on its shard as changes of the shard.
        versions = zip(tensor_versions(computes), _master_versions(parameters), strict=True)
        for p, published in zip(parameters, versions, strict=True):
            p.published = published
        forget_taken(computes)
        forget_taken([p.master for p in parameters])


def with_written_masters(parameters: Sequence[ZeroParameter]) -> list[ZeroParameter]:
    """Those whose master, where it is not `compute`, was written since :func:`note_published`."""
    versions, taken = _master_versions(parameters), are_data_taken([p.master for p in parameters])
    return [
        p
        for p, version, is_taken in zip(parameters, versions, taken, strict=True)
        if version != p.published[1] or is_taken
    ]


def written(parameters: Sequence[ZeroParameter], *, in_backward: bool = False) -> list[ZeroParameter]:
    """Those whose `compute` was written, or given other memory, since :func:`note_published`.

    A step asks for all of a model several times, so nothing is called for one alone.

    Args:
        parameters: none of fakes.
        in_backward: whether autograd may hold their memory, so that other holders say nothing about the user's code.
    """
    computes = [p.compute for p in parameters]
    versions, taken = tensor_versions(computes), are_data_taken(computes)
    return [
        p
        for p, compute, version, is_taken in zip(parameters, computes, versions, taken, strict=True)
        if version != p.published[0]
        or is_taken
        or compute.data_ptr() != p.address
        or (p.is_copy and not in_backward and storage_owners(p.storage) > p.owners)  # somebody kept compute.data
    ]


def _master_versions(parameters: Sequence[ZeroParameter]) -> list[int]:
    masters, shards = [p.master for p in parameters], [p.shard for p in parameters]
    return list(map(operator.add, tensor_versions(masters), tensor_versions(shards)))


def _address(tensor: torch.Tensor) -> int:
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
