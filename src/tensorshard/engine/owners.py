"""Owners: ranks that update whole parameters of which every rank has a part, for optimizers that need the whole.

An optimizer may couple the elements of a tensor: Muon its rows and columns, LAMB by a norm, Adafactor by means, others
by blocks of 8-bit states. Each parameter then has an owner among the ranks that have parts of it. Before an update all
ranks send their parts of weight and gradient to the owners, which make one step of the real optimizer, and send the
parts back. States stay with the owners. Owners share the parameters by their elements, so that a rank holds about as
much as its parts would take. (Distributed Shampoo and Muon share the work in this way: Shi et al. 2023, Liu et al.
2025.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from tensorshard.comm.primitives import start_exchange
from tensorshard.comm.sharding import shard_range
from tensorshard.data_parallel.sharded_model import ParameterSplit, ShardedModel
from tensorshard.model.parameters import like
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.dtensor import shard_of

_ROUND_BYTES = 32 << 20  # that a rank sends at a time; two such rounds are under way


@dataclass(frozen=True)
class Piece:
    """A block of elements that a rank has of a whole tensor.

    Args:
        whole: where it is in the whole.
        local: where it is in the rank's part.
        shape: of the block.
    """

    whole: tuple[slice, ...]
    local: tuple[slice, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class _Place:
    """A rank's place among the ranks that a parameter is split over."""

    data: int
    tensor: int


def pieces_of(
    shape: Sequence[int], layout: Any, tensor: tuple[int, int], data: tuple[int, int] | None
) -> tuple[Piece, ...]:
    """What one rank has of a parameter.

    Args:
        shape: of the whole.
        layout: how tensor parallelism splits it.
        tensor: the rank's index among the tensor-parallel ranks, and their number.
        data: the same for the data ranks that each keep some of the rows; None if each keeps all.
    """
    part = list(shape)
    runs = [(0, 0, shape[0])] if shape else []  # along `dim`: start in the whole, start in the part, length
    dim = 0
    if layout.dim is not None:
        dim, runs, position = layout.dim, [], 0
        for start, length in layout.ranges(*tensor):
            runs.append((start, position, length))
            position += length
        part[dim] = position
    if not shape:
        return (Piece((), (), ()),)
    first, rows = (0, part[0]) if data is None else shard_range(part[0], data[1], data[0])
    pieces = []
    for start, position, length in runs:
        whole = [slice(0, size) for size in part]
        local = [slice(0, size) for size in part]
        whole[0], local[0] = slice(first, first + rows), slice(0, rows)
        if dim != 0:
            whole[dim], local[dim] = slice(start, start + length), slice(position, position + length)
        else:
            low, high = max(position, first), min(position + length, first + rows)
            if high <= low:
                continue
            whole[0] = slice(start + low - position, start + high - position)
            local[0] = slice(low - first, high - first)
        piece = Piece(tuple(whole), tuple(local), tuple(each.stop - each.start for each in whole))
        if piece.numel:
            pieces.append(piece)
    return tuple(pieces)


@dataclass(frozen=True)
class _Route:
    """How one parameter travels.

    Args:
        owner: the rank, within the group, that updates it.
        pieces: what each rank of the group has.
        sources: the ranks whose pieces make up the whole, each element once.
    """

    owner: int
    pieces: tuple[tuple[Piece, ...], ...]
    sources: tuple[int, ...]

    @property
    def is_with_owner(self) -> bool:
        """Whether the owner has the whole parameter anyway."""
        return self.sources == (self.owner,)


class Owners:
    """The parameters that are updated whole, each by its owner.

    Args:
        sharded: the model, whose masters are this rank's parts.
        data_sharded: whether data ranks keep parts of the masters.

    Attributes:
        parameters: by name, in the model's order, those that this rank owns, as the optimizer sees them. They have
            values and gradients during an update alone.
    """

    def __init__(self, sharded: ShardedModel, mesh: Mesh, *, data_sharded: bool) -> None:
        self._sharded = sharded
        self._split: ParameterSplit = sharded.split
        self._data = mesh.shard_size if data_sharded else 1
        self._tensor = mesh.degrees["tp"]
        self._group = mesh.merged("owners", *(["dp_shard", "cp"] if self._data > 1 else []), "tp")
        self._places = [_Place(data, tensor) for data in range(self._data) for tensor in range(self._tensor)]
        self._rank = self._group.rank()
        self._routes: dict[str, _Route] = {}
        self._loads = [0] * len(self._places)
        self._moved: list[str] = []  # those that have values now
        self._is_gathered = False  # the optimizer's own code runs
        self.parameters: dict[str, nn.Parameter] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of all parameters that are updated whole, by any rank."""
        return frozenset(self._routes)

    def owner(self, name: str) -> int:
        """The rank of the world that updates the parameter `name`."""
        return dist.get_global_rank(self._group, self._routes[name].owner)

    def add(self, names: Iterable[str]) -> None:
        """Gives each of the parameters `names` an owner. The same on all ranks, without communication."""
        shapes = self._sharded.full_shapes()
        new = [name for name in names if name not in self._routes]
        for name in sorted(new, key=lambda name: -shapes[name].numel()):
            owner = min(range(len(self._loads)), key=lambda rank: (self._loads[rank], rank))
            self._loads[owner] += max(1, shapes[name].numel())
            self._routes[name] = self._route(name, shapes[name], owner)
        self._routes = {name: self._routes[name] for name in self._sharded.masters() if name in self._routes}
        for name in new:
            if self._routes[name].owner == self._rank:
                self.parameters[name] = self.placeholder(name)
        self.parameters = {name: self.parameters[name] for name in self._routes if name in self.parameters}

    def _route(self, name: str, shape: torch.Size, owner: int) -> _Route:
        layout, master = self._split.layout(name), self._sharded.masters()[name]
        by_data = self._data > 1 and isinstance(master, DTensor)
        by_tensor = self._tensor > 1 and layout.dim is not None
        pieces = tuple(
            pieces_of(shape, layout, (at.tensor, self._tensor), (at.data, self._data) if by_data else None)
            for at in self._places
        )
        own = self._places[owner]
        sources = tuple(
            rank
            for rank, at in enumerate(self._places)
            if (by_data or at.data == own.data) and (by_tensor or at.tensor == own.tensor)
        )
        return _Route(owner, pieces, sources)

    def placeholder(self, name: str) -> nn.Parameter:
        """A parameter of the whole's shape with room for one number, and what user code hung on the original."""
        master = self._sharded.masters()[name]
        return like(master, _no_room(self._sharded.full_shapes()[name], shard_of(master.detach())))

    def given(self, masters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """What the optimizer's factory is given in place of `masters`."""
        return {
            name: self.parameters[name]
            if name in self.parameters
            else self.placeholder(name)
            if name in self._routes
            else master
            for name, master in masters.items()
        }

    # -- an update --

    @torch.no_grad()
    def gather(self) -> None:
        """Brings weights and gradients to the owners, of the parameters that have a gradient. A collective."""
        masters = self._sharded.masters()
        self._gather([name for name in self._routes if masters[name].grad is not None], gradients=True)

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Brings all weights to their owners. A collective."""
        self._gather(list(self._routes), gradients=False)

    def _gather(self, names: list[str], *, gradients: bool) -> None:
        self.release()
        self._moved, self._is_gathered = names, True
        with self._sharded.computing_on_parts():
            masters = self._sharded.masters()
            parts = {}
            for name in names:
                tensors = [shard_of(masters[name].detach())]
                if gradients:
                    tensors.append(shard_of(masters[name].grad).detach())
                parts[name] = tensors
            for name in names:
                if self._routes[name].owner == self._rank:
                    owned, shape = self.parameters[name], self._sharded.full_shapes()[name]
                    alone = self._routes[name].is_with_owner
                    wholes = parts[name] if alone else [part.new_empty(shape) for part in parts[name]]
                    owned.data = wholes[0]
                    if gradients:
                        owned.grad = wholes[1]
            self._exchange(names, parts, to_owners=True)

    @torch.no_grad()
    def scatter(self) -> None:
        """Brings the updated weights back to all ranks that have a part of them. A collective."""
        with self._sharded.computing_on_parts():
            masters = self._sharded.masters()
            parts = {name: [shard_of(masters[name].detach())] for name in self._moved}
            self._exchange(self._moved, parts, to_owners=False)
            # On all ranks alike, those that have none of a parameter, too: what was written is published by all.
            increment_version([part for each in parts.values() for part in each])
        self.release()

    @torch.no_grad()
    def release(self) -> None:
        """Frees the whole weights and gradients."""
        for name in self._moved:
            owned = self.parameters.get(name)
            if owned is not None:
                owned.grad = None
                owned.data = _no_room(owned.shape, owned)
        self._moved, self._is_gathered = [], False

    def _exchange(self, names: list[str], parts: Mapping[str, list[torch.Tensor]], *, to_owners: bool) -> None:
        under_way: list[Callable[[], None]] = []
        for together in self._rounds(names, parts):
            under_way.append(self._start(together, parts, to_owners=to_owners))
            if len(under_way) > 1:
                under_way.pop(0)()
        for finish in under_way:
            finish()

    def _rounds(self, names: list[str], parts: Mapping[str, list[torch.Tensor]]) -> Iterable[list[str]]:
        """Parameters of one type that travel together, in one order on all ranks."""
        dtypes = dict.fromkeys(parts[name][0].dtype for name in names)
        for dtype in dtypes:
            together: list[str] = []
            held = 0
            for name in names:
                if parts[name][0].dtype != dtype:
                    continue
                together.append(name)
                held += self._sharded.full_shapes()[name].numel() * dtype.itemsize * len(parts[name])
                if held >= _ROUND_BYTES * len(self._places):
                    yield together
                    together, held = [], 0
            if together:
                yield together

    def _start(
        self, names: list[str], parts: Mapping[str, list[torch.Tensor]], *, to_owners: bool
    ) -> Callable[[], None]:
        """Starts one round; returns what ends it."""
        size, me = len(self._places), self._rank
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(size)]
        arriving: list[list[tuple[torch.Tensor, torch.Size]]] = [[] for _ in range(size)]  # views that are filled
        travels = False
        for name in names:
            route = self._routes[name]
            others = [rank for rank in (route.sources if to_owners else range(size)) if rank != route.owner]
            travels = travels or any(route.pieces[rank] for rank in others)
            if route.owner == me:
                owned = self.parameters[name]
                wholes = [owned.data] if owned.grad is None or not to_owners else [owned.data, owned.grad]
                for whole, part in zip(wholes, parts[name], strict=True):
                    if not route.is_with_owner and (me in route.sources or not to_owners):
                        for piece in route.pieces[me]:
                            here, there = whole[piece.whole], part[piece.local]
                            (here.copy_(there) if to_owners else there.copy_(here))
                    for rank in others:
                        for piece in route.pieces[rank]:
                            view = whole[piece.whole]
                            if to_owners:
                                arriving[rank].append((view, view.shape))
                            else:
                                outgoing[rank].append(view.reshape(-1))
            elif me in others:
                for part in parts[name]:
                    for piece in route.pieces[me]:
                        view = part[piece.local]
                        if to_owners:
                            outgoing[route.owner].append(view.reshape(-1))
                        else:
                            arriving[route.owner].append((view, view.shape))
        if not travels:
            return _nothing
        some = parts[names[0]][0]
        sizes = [sum(shape.numel() for _, shape in views) for views in arriving]
        finish = start_exchange(outgoing, sizes, some, self._group)

        def unpack() -> None:
            for message, views in zip(finish(), arriving, strict=True):
                counts = [shape.numel() for _, shape in views]
                for values, (view, shape) in zip(message.split(counts) if counts else (), views, strict=True):
                    view.copy_(values.view(shape))

        return unpack

    # -- the optimizer --

    def attach(self, optimizer: torch.optim.Optimizer, methods: Iterable[str]) -> None:
        """Makes `optimizer` clear the gradients of parts, too, and run its `methods`, such as ``eval``, on wholes.

        All ranks then call these methods together.
        """
        clear = optimizer.zero_grad

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            self.release()  # after a step that failed
            clear(set_to_none)
            with self._sharded.computing_on_parts():
                masters = self._sharded.masters()
                for name in self._routes:
                    gradient = masters[name].grad
                    if gradient is not None and not set_to_none:
                        shard_of(gradient).zero_()
                    elif gradient is not None:
                        masters[name].grad = None

        optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
        for name in methods:
            setattr(optimizer, name, MethodType(self._on_wholes(getattr(optimizer, name)), optimizer))

    def _on_wholes(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._is_gathered:  # the optimizer itself calls it, in its step
                return method(*args, **kwargs)
            self.gather_weights()
            try:
                result = method(*args, **kwargs)
                self.scatter()
                return result
            finally:
                self.release()

        return call


def _nothing() -> None:
    """Ends a round in which nothing travels."""


def _no_room(shape: torch.Size, of: torch.Tensor) -> torch.Tensor:
    """A tensor of `shape` with room for one number, of the type and on the device of another."""
    return torch.zeros((), dtype=of.dtype, device=of.device).expand(shape)
