"""Attention in rounds: in each, keys and values of one other rank come, and the result so far is merged with theirs in
fp32. So a rank holds those of two others at most (Liu et al., Ring Attention with Blockwise Transformers, 2023).

Between machines those of a rank travel once, to one rank of each machine, which hands them to its neighbours. Their
gradients are summed there, and travel back once. A rank then holds those of three others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tensorshard.context_parallel.context_group import ContextGroup
from tensorshard.context_parallel.exchanges import add_at, length_of, refuse_double_backward, take
from tensorshard.context_parallel.layouts import Array, Index, SequenceLayout, as_index
from tensorshard.torch_private.attention import attend_to_part, partial_attention_gradients

_Span = tuple[int, int]
_RUNS = 4
"""A kernel is called for pairs of runs."""


@dataclass(frozen=True)
class _Block:
    """Queries of this rank that see keys of a round: all of them, or, if `is_causal`, each those up to its own."""

    rows: _Span
    keys: _Span
    is_causal: bool


@dataclass(frozen=True)
class _Round:
    """Who sends what to whom.

    Attributes:
        via: the rank that the keys and values come from. They are its own, or those of another machine's that it has.
        target: the rank that gets some from this one.
        passes_on: whether this rank sends what it got from another machine, and not its own.
        send: the places of these that the target needs.
        count: how many come.
        blocks: what is computed with them.
        arrives: whether they come from another machine, and are passed on in the following rounds.
        returns: the round in which what is passed on in this one and before came; None if there is more to come.
    """

    via: int
    target: int
    passes_on: bool
    send: Index
    count: int
    blocks: list[_Block]
    arrives: bool
    returns: int | None


@lru_cache(64)
def rounds(
    queries: SequenceLayout, keys: SequenceLayout, rank: int, is_causal: bool, neighbours: int
) -> list[_Round] | None:
    """What `rank` does: first its own keys, then those of other ranks. None for causal attention if ranks have many
    runs of positions, or if queries and keys overlap otherwise than run by run.

    Args:
        neighbours: how many consecutive ranks share a machine; a divisor of the number of ranks.
    """
    size = queries.ranks
    if is_causal and (max(map(len, queries.runs)) > _RUNS or _needed(queries, keys) is None):
        return None
    machine, place = divmod(rank, neighbours)
    machines = size // neighbours

    def at(machine: int, place: int) -> int:
        return machine % machines * neighbours + place % neighbours

    def needs(receivers: Iterable[int], source: int) -> list[int]:
        """The runs of the source's keys that one of the receivers needs."""
        needed = _needed(queries, keys) if is_causal else None
        if needed is None:
            return list(range(len(keys.runs[source])))
        return sorted(set().union(*(needed[receiver, source] for receiver in receivers)))

    def all_of(machine: int) -> Iterable[int]:
        return range(at(machine, 0), at(machine, 0) + neighbours)

    schedule = []
    for step in range(size):
        ahead, along = divmod(step, neighbours)
        source = at(machine + ahead, place + along)
        arrives, passes_on = ahead > 0 and along == 0, ahead > 0 and along > 0
        own = at(machine + ahead, place) if passes_on else rank  # whose keys this rank sends
        via, target = (at(machine, place + along), at(machine, place - along)) if ahead == 0 or passes_on else (
            source, at(machine - ahead, place)
        )  # fmt: skip
        coming = needs(all_of(machine) if arrives else [rank], source)
        going = needs(all_of(machine - ahead) if arrives else [target], own)
        there = needs(all_of(machine), own) if passes_on else list(range(len(keys.runs[own])))
        send = _places(keys.runs[own][there], [there.index(run) for run in going])
        count, blocks = _blocks(queries.runs[rank], keys.runs[source], coming, is_causal)
        last = ahead > 0 and along == neighbours - 1
        returns = ahead * neighbours if last else None
        schedule.append(_Round(via, target, passes_on, as_index(send), count, blocks, arrives, returns))
    return schedule


@lru_cache(64)
def _needed(queries: SequenceLayout, keys: SequenceLayout) -> dict[_Span, list[int]] | None:
    """For each pair of ranks, the runs of the second's keys that queries of the first see."""
    needed = {}
    for rank in range(queries.ranks):
        for source in range(queries.ranks):
            seen = set()
            for start, stop in queries.runs[rank]:
                for index, (first, end) in enumerate(keys.runs[source]):
                    if first >= stop:
                        continue
                    if end - 1 > start and (first, end) != (start, stop):
                        return None
                    seen.add(index)
            needed[rank, source] = sorted(seen)
    return needed


def _places(runs: Array, chosen: list[int]) -> Array:
    """Where a rank holds the chosen ones of its runs."""
    ends = np.cumsum(runs[:, 1] - runs[:, 0])
    starts = ends - (runs[:, 1] - runs[:, 0])
    return np.stack([starts, ends], 1)[chosen].reshape(-1, 2)


def _blocks(queries: Array, keys: Array, chosen: list[int], is_causal: bool) -> tuple[int, list[_Block]]:
    """How many keys come, and what they are used for."""
    blocks: list[_Block] = []
    sizes = [int(keys[index, 1] - keys[index, 0]) for index in chosen]
    if not is_causal:
        asking, count = int(np.diff(queries).sum()), sum(sizes)
        return count, [_Block((0, asking), (0, count), False)] if asking and count else []
    ends = np.cumsum(sizes).tolist()
    row = 0
    for start, stop in queries.tolist():
        rows = (row, row + stop - start)
        row = rows[1]
        whole: list[_Span] = []
        for index, size, end in zip(chosen, sizes, ends, strict=True):
            first, last = keys[index].tolist()
            span = (end - size, end)
            if (first, last) == (start, stop):
                blocks.append(_Block(rows, span, True))
            elif last - 1 <= start:
                joins = whole and whole[-1][1] == span[0]
                whole[-1:] = [(whole[-1][0], span[1])] if joins else [*whole[-1:], span]
        for span in whole:
            before = blocks[-1] if blocks else None
            if before and not before.is_causal and before.keys == span and before.rows[1] == rows[0]:
                blocks[-1] = _Block((before.rows[0], rows[1]), span, False)
            else:
                blocks.append(_Block(rows, span, False))
    return sum(sizes), blocks


def ring_attention(
    query: torch.Tensor,
    keys_and_values: torch.Tensor,
    plan: list[_Round],
    scale: float | None,
    group: ContextGroup,
) -> torch.Tensor:
    """This rank's queries attend to the keys of all ranks. A collective, in backward too.

    Args:
        query: [samples, heads, queries, width].
        keys_and_values: this rank's, side by side: [samples, key heads, keys, 2 width].
        plan: from :func:`rounds`.
    """
    out: torch.Tensor = _Ring.apply(query, keys_and_values, plan, scale, group)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, own: torch.Tensor, plan: list[_Round], scale: float | None, group: ContextGroup
    ) -> torch.Tensor:
        numbers, rest = [group.number_call() for _ in plan], list[Any]()
        ctx.about = plan, scale, group, numbers, rest
        arrivals = _Arrivals(own, plan, group, "attention", numbers)
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(query.shape, dtype=wide)
        sums = query.new_full(query.shape[:-1], -torch.inf, dtype=wide)
        for step, each in enumerate(plan):
            part = arrivals.take(step)
            for block in each.blocks:
                rows = slice(*block.rows)
                now, sums_now, kept = _Call(query, part, block, scale).forward()
                rest.append(kept)
                before = sums[:, :, rows]
                after = torch.logaddexp(before, sums_now)
                share = (before - after).exp_().unsqueeze(-1)
                out[:, :, rows].mul_(share).add_(now * (sums_now - after).exp_().unsqueeze(-1))
                before.copy_(after)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, own, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_double_backward()
        query, own, out, sums = ctx.saved_tensors
        plan, scale, group, numbers, rest = ctx.about
        kept = iter(rest)
        arrivals = _Arrivals(own, plan, group, "attention again", numbers)
        of_query = torch.zeros_like(query, dtype=sums.dtype)
        of_own = torch.zeros_like(own, dtype=sums.dtype)
        of_passed = of_own  # of what came from another machine
        add: Callable[[], None] = lambda: None  # noqa: E731
        for step, each in enumerate(plan):
            part = arrivals.take(step)
            of_part = of_own if step == 0 else torch.zeros_like(part, dtype=sums.dtype)
            for block in each.blocks:
                gradients = _Call(query, part, block, scale).backward(grads[0], out, sums, next(kept))
                of_query[:, :, slice(*block.rows)] += gradients[0]
                of_part[:, :, slice(*block.keys)] += torch.cat(gradients[1:], -1)
            if each.arrives:
                of_passed = of_part
            elif step:
                add()  # what was given back in the round before, while this one was computed
                total = of_passed if each.passes_on else of_own
                add = _give_back(of_part, each, total, own.dtype, group, numbers[step])
            if each.returns is not None:
                add()  # to what is given back now
                add = _give_back(of_passed, plan[each.returns], of_own, own.dtype, group, numbers[each.returns])
        add()
        return of_query.to(query.dtype), of_own.to(own.dtype), None, None, None


def _give_back(
    of_part: torch.Tensor, each: _Round, total: torch.Tensor, dtype: torch.dtype, group: ContextGroup, number: int
) -> Callable[[], None]:
    """Starts sending the gradient of what has come in a round to where it came from. Returns what waits for that which
    comes back, and adds it to `total`."""
    shapes = _shapes(total, length_of(each.send, total.shape[-2]), each.target, group)
    finish = group.start(_pieces(of_part.to(dtype), each.via, group), shapes, "attention'", number)
    return lambda: add_at(total, -2, each.send, finish()[each.target])


class _Arrivals:
    """Keys and values as they come. Those of a round travel while the round before is computed."""

    def __init__(
        self, own: torch.Tensor, plan: list[_Round], group: ContextGroup, what: str, numbers: list[int]
    ) -> None:
        self._own, self._plan, self._group = own, plan, group
        self._passed = own
        self._what, self._numbers = what, numbers
        self._finish: Callable[[], list[torch.Tensor]] = list

    def take(self, step: int) -> torch.Tensor:
        """Those of a round, in turn."""
        part = self._own if step == 0 else self._finish()[self._plan[step].via]
        if self._plan[step].arrives:
            self._passed = part
        if step + 1 < len(self._plan):
            coming = self._plan[step + 1]
            held = self._passed if coming.passes_on else self._own
            self._finish = self._group.start(
                _pieces(take(held, -2, coming.send), coming.target, self._group),
                _shapes(self._own, coming.count, coming.via, self._group),
                self._what,
                self._numbers[step + 1],
            )
        return part


def _pieces(piece: torch.Tensor, target: int, group: ContextGroup) -> list[torch.Tensor]:
    """What each rank gets: `piece` for `target`."""
    return [piece if rank == target else piece.new_empty(0) for rank in range(group.size)]


def _shapes(own: torch.Tensor, count: int, source: int, group: ContextGroup) -> list[tuple[int, ...]]:
    """What comes from each rank: `count` positions from `source`."""
    return [(*own.shape[:-2], count, own.shape[-1]) if rank == source else (0,) for rank in range(group.size)]


class _Call:
    """One call of a kernel: `block` of this rank's queries and of `part`, with as many heads of both."""

    def __init__(self, query: torch.Tensor, part: torch.Tensor, block: _Block, scale: float | None) -> None:
        self._rows, self._keys, self._is_causal = slice(*block.rows), slice(*block.keys), block.is_causal
        self._scale = scale
        self._heads, self._shared = part.shape[1], query.shape[1] // part.shape[1]
        self._query = self._in(query)
        key, value = part[:, :, self._keys].chunk(2, -1)
        if self._is_causal and self._shared > 1:
            key, value = (each.repeat_interleave(self._shared, 1) for each in (key, value))
        self._key, self._value = key, value

    def _in(self, of_query: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor [samples, heads, queries, *], with queries of one key's heads as rows of one head."""
        own = of_query[:, :, self._rows]
        if self._is_causal or self._shared == 1:
            return own
        return own.unflatten(1, (self._heads, self._shared)).flatten(2, 3)

    def _out(self, result: torch.Tensor) -> torch.Tensor:
        if self._is_causal or self._shared == 1:
            return result
        return result.unflatten(2, (self._shared, -1)).flatten(1, 2)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, Any]:
        out, sums, rest = attend_to_part(self._query, self._key, self._value, self._is_causal, self._scale)
        return self._out(out), self._out(sums), rest

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        of_query, of_key, of_value = partial_attention_gradients(
            self._in(grad), self._query, self._key, self._value, self._in(out), self._in(sums), rest,
            self._is_causal, self._scale,
        )  # fmt: skip
        if self._is_causal and self._shared > 1:
            of_key, of_value = (each.unflatten(1, (self._heads, -1)).sum(2) for each in (of_key, of_value))
        return self._out(of_query), of_key, of_value
