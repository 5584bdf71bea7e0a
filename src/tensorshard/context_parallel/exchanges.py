"""The two collectives: fetching positions from the ranks that hold them, and splitting another dimension instead.

Gradients: every rank's graph is one summand of the whole gradient. So the adjoint of fetching is to send the gradients
back and to add them. Exchanges keep their group, since backward may run in another thread and outside of everything.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tensorshard.context_parallel.context_group import ContextGroup
from tensorshard.context_parallel.layouts import (
    Index,
    Places,
    PositionLists,
    SequenceLayout,
    as_index,
    contiguous,
    runs_of,
)

_Turning = tuple[int, SequenceLayout, int, SequenceLayout]
"""The dimension that is split and its layout, then those of the result."""


@dataclass
class _Route:
    """How a fetch moves positions.

    Attributes:
        send: for each rank, the places that it wants of this rank.
        counts: how many positions come from each rank.
        order: where each arrived position is in order of the ranks; None if they arrive in the right order.
        back: the inverse of `order`.
        held: how many positions this rank has.
    """

    send: list[Index | None]
    counts: list[int]
    order: Places | None
    back: Places | None
    held: int


def fetch(
    local: torch.Tensor,
    dim: int,
    layout: SequenceLayout,
    wanted: PositionLists | None,
    what: str,
    group: ContextGroup,
) -> torch.Tensor:
    """A plain tensor of the positions that this rank wants. Every rank has to call it.

    Args:
        local: this rank's positions, along `dim`.
        layout: which rank holds which.
        wanted: for each rank, the positions; None for all positions on every rank.
        what: it is for, as reports say.
    """
    if wanted is not None and _is_held(layout, wanted):
        return take(local, dim, _places(layout, wanted, group.rank))
    return _Fetch.apply(local, dim, _route(layout, wanted, group.rank), what, group)  # type: ignore[no-any-return]


def turn(
    local: torch.Tensor,
    dim: int,
    layout: SequenceLayout,
    new_dim: int,
    new_layout: SequenceLayout,
    what: str,
    group: ContextGroup,
) -> torch.Tensor:
    """An all-to-all: this rank's part along `new_dim`, with all positions of `dim`."""
    return _Turn.apply(local, (dim, layout, new_dim, new_layout), what, group)  # type: ignore[no-any-return]


def stack_ranks(partial: torch.Tensor, what: str, group: ContextGroup) -> torch.Tensor:
    """Every rank's tensor: [ranks, *shape]."""
    return fetch(partial[None], 0, contiguous(group.size, group.size), None, what, group)


def sum_ranks(partial: torch.Tensor, what: str, group: ContextGroup) -> torch.Tensor:
    """The sum of every rank's tensor."""
    return stack_ranks(partial, what, group).sum(0, dtype=partial.dtype)


def tie(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """`tensor`, in whose backward the others take part with zeros. With it, the collectives of the others' backward
    run on every rank, whether or not a rank uses their values."""
    return _Tie.apply(tensor, *others)  # type: ignore[no-any-return]


def take(tensor: torch.Tensor, dim: int, index: Index | None) -> torch.Tensor:
    """The indexed places along `dim`, all for None: a view for a slice."""
    if index is None:
        return tensor
    if isinstance(index, slice):
        return tensor.narrow(dim, index.start, index.stop - index.start)
    return tensor.index_select(dim, index.on(tensor.device))


def add_at(total: torch.Tensor, dim: int, index: Index | None, piece: torch.Tensor) -> None:
    """Adds `piece` to the indexed places along `dim`."""
    if isinstance(index, Places):
        total.index_add_(dim, index.on(total.device), piece.to(total.dtype))
    else:
        take(total, dim, index).add_(piece)


@lru_cache(512)
def _is_held(layout: SequenceLayout, wanted: PositionLists) -> bool:
    """Whether every rank holds what it wants."""
    return all((layout.owner[wanted.positions(rank)] == rank).all() for rank in range(layout.ranks))


@lru_cache(512)
def _places(layout: SequenceLayout, wanted: PositionLists, rank: int) -> Index:
    return as_index(runs_of(layout.place[wanted.positions(rank)]))


@lru_cache(256)
def _route(layout: SequenceLayout, wanted: PositionLists | None, rank: int) -> _Route:
    ranks = range(layout.ranks)
    if wanted is None:
        send: list[Index | None] = [None for _ in ranks]
        counts = layout.sizes
        if layout.is_ordered:
            return _Route(send, counts, None, None, layout.sizes[rank])
        order = np.concatenate([layout.positions(each) for each in ranks])
    else:
        send = []
        for each in ranks:
            asked = wanted.positions(each)
            send.append(as_index(runs_of(layout.place[asked[layout.owner[asked] == rank]])))
        owner = layout.owner[wanted.positions(rank)]
        counts = [int((owner == each).sum()) for each in ranks]
        order = np.argsort(owner, kind="stable")
        if (order == np.arange(len(order))).all():
            return _Route(send, counts, None, None, layout.sizes[rank])
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return _Route(send, counts, Places(order), Places(back), layout.sizes[rank])


def refuse_double_backward() -> None:
    """Raises an error in a backward that is differentiated itself."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "context parallelism has no second derivatives (create_graph=True): each rank has only a part of the first "
            "ones. Compute such a loss without cp"
        )


class _Fetch(torch.autograd.Function):
    """Positions from the ranks that hold them. In backward, their gradients go back and are added."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, dim: int, route: _Route, what: str, group: ContextGroup) -> torch.Tensor:
        ctx.about = dim, route, what, group, group.number_call()
        x = local.movedim(dim, 0) if dim else local
        shapes = [(count, *x.shape[1:]) for count in route.counts]
        got = group.exchange([take(x, 0, index) for index in route.send], shapes, what, ctx.about[-1])
        out = torch.cat(got)
        out = take(out, 0, route.back)
        return out.movedim(0, dim).contiguous() if dim else out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_double_backward()
        dim, route, what, group, number = ctx.about
        grad = take(grads[0].movedim(dim, 0), 0, route.order)
        shapes = [(length_of(index, route.held), *grad.shape[1:]) for index in route.send]
        got = group.exchange(list(grad.split(route.counts)), shapes, what + "'", number)
        total = grad.new_zeros(route.held, *grad.shape[1:])
        for index, piece in zip(route.send, got, strict=True):
            add_at(total, 0, index, piece)
        return total.movedim(0, dim), None, None, None, None


def length_of(index: Index | None, held: int) -> int:
    """How many places are indexed, of `held` ones."""
    if index is None:
        return held
    return index.stop - index.start if isinstance(index, slice) else len(index)


class _Turn(torch.autograd.Function):
    """An all-to-all; its adjoint is the one back."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, about: _Turning, what: str, group: ContextGroup) -> torch.Tensor:
        ctx.about = about, what, group, group.number_call()
        return _turned(local, about, what, group, ctx.about[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_double_backward()
        (dim, layout, new_dim, new_layout), what, group, number = ctx.about
        back = new_dim, new_layout, dim, layout
        return _turned(grads[0], back, what + "'", group, number), None, None, None


def _turned(local: torch.Tensor, about: _Turning, what: str, group: ContextGroup, number: int) -> torch.Tensor:
    dim, layout, new_dim, new_layout = about
    pieces = [take(local, new_dim, new_layout.index(rank)) for rank in range(group.size)]
    shape = list(local.shape)
    shape[new_dim] = new_layout.sizes[group.rank]
    shapes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in layout.sizes]
    out = torch.cat(group.exchange(pieces, shapes, what, number), dim)
    return out if layout.is_ordered else take(out, dim, _inverse(layout))


@lru_cache(256)
def _inverse(layout: SequenceLayout) -> Places:
    return Places(np.argsort(np.concatenate([layout.positions(rank) for rank in range(layout.ranks)])))


class _Tie(torch.autograd.Function):
    """The first tensor; in backward, the others get zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(other.shape, other.dtype, other.device) for other in others]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes]
        return grads[0], *zeros
