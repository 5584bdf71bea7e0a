"""Who holds which positions of a sequence, and what travels."""

import json
from typing import Any

from drawings.svg import RESULTS, arrow, rectangle, svg, text
from tensorshard.context_parallel import SequenceLayout, contiguous, zigzag

_RANKS, _POSITIONS = 4, 16
_KINDS = ("parameters", "gradients", "states", "activations")  # a color of each rank
_CELL = 13  # pixels
_SHOWN = 1  # the rank whose messages are drawn
_REACH = 2  # positions before its own that a causal convolution of three positions needs


def draw_context() -> str:
    """Four ranks that share a sequence: what each computes of causal attention, and what one of them receives."""
    left, top, apart = 30, 84, 300
    shapes = [text(left, 30, "16 positions on four ranks", "strong")]
    for rank, kind in enumerate(_KINDS):
        x = left + 220 + rank * 82
        shapes += [rectangle(x, 18, 14, 14, kind, corner=2), text(x + 21, 30, f"rank {rank}")]
    for column, (name, layout) in enumerate(
        [("contiguous", contiguous(_POSITIONS, _RANKS)), ("zig-zag", zigzag(_POSITIONS, _RANKS))]
    ):
        shapes += _attention(left + column * apart, top, f"causal attention, {name}", layout)
    y = top + _POSITIONS * _CELL + 56
    shapes.append(text(left, y, f"What rank {_SHOWN} receives, in contiguous order", "strong"))
    shapes += [
        rectangle(left + 372, y - 11, 14, 14, "gathered", corner=2),
        text(left + 393, y + 1, "comes from others"),
    ]
    for row, draw in enumerate(_ROWS):
        shapes += draw(left, y + 24 + row * 34)
    description = (
        "In contiguous order rank 0 holds positions 0 to 3, rank 1 4 to 7, and so on; of the 136 pairs of causal "
        f"attention they compute {_listed(contiguous(_POSITIONS, _RANKS))}. In zig-zag order rank 0 holds 0, 1, 14 "
        f"and 15, rank 1 2, 3, 12 and 13; each computes {_pairs(zigzag(_POSITIONS, _RANKS), 0)}. Rank 1 receives: "
        "keys and values of the positions before its own, if attention gathers them; a quarter of the heads at every "
        "position, if it exchanges heads; two positions, for a convolution of three; a state, for an LSTM; a sum of "
        "each other rank, for a mean or a norm over time."
    )
    return svg(
        left + 2 * apart + 10,
        y + 24 + len(_ROWS) * 34 + 4,
        "Context parallelism: who holds which positions, and what travels",
        description,
        shapes,
    )


def _attention(left: float, top: float, title: str, layout: SequenceLayout) -> list[str]:
    """A row for each query, as long as the keys that it sees, in the color of the rank that computes it."""
    shapes = [text(left, top - 24, title), text(left, top - 8, "a row for each query, as long as its keys", "tiny")]
    shapes.append(rectangle(left, top, _POSITIONS * _CELL, _POSITIONS * _CELL, "room"))
    for query, owner in enumerate(layout.owner):
        shapes.append(rectangle(left, top + query * _CELL, (query + 1) * _CELL - 1, _CELL - 1, _KINDS[owner]))
    for rank in range(_RANKS):
        right = left + _POSITIONS * _CELL + 8
        shapes.append(text(right, top + 14 + rank * 17, f"rank {rank}: {_pairs(layout, rank)} pairs", "tiny"))
    return shapes


def _pairs(layout: SequenceLayout, rank: int) -> int:
    """How many pairs of a query and a key a rank computes."""
    return int((layout.positions(rank) + 1).sum())


def _listed(layout: SequenceLayout) -> str:
    return ", ".join(str(_pairs(layout, rank)) for rank in range(_RANKS))


def _row(left: float, y: float, words: str, received: str) -> list[str]:
    shapes = [text(left, y + 11, words), text(left + 372, y + 11, received, "small")]
    return [*shapes, rectangle(left + 150, y, _POSITIONS * _CELL, _CELL, "room")]


def _cells(left: float, y: float, start: int, stop: int, kind: str, height: float = _CELL) -> str:
    return rectangle(left + 150 + start * _CELL, y, (stop - start) * _CELL - 1, height, kind)


def _own(left: float, y: float) -> str:
    each = _POSITIONS // _RANKS
    return _cells(left, y, _SHOWN * each, (_SHOWN + 1) * each, _KINDS[_SHOWN])


def _gathered(left: float, y: float) -> list[str]:
    start = _SHOWN * _POSITIONS // _RANKS
    return [
        *_row(left, y, "attention", "keys and values before its last"),
        _cells(left, y, 0, start, "gathered"),
        _own(left, y),
    ]


def _heads(left: float, y: float) -> list[str]:
    high = _CELL / _RANKS
    return [
        *_row(left, y, "attention over heads", "a quarter of the heads, and back"),
        _cells(left, y + _SHOWN * high, 0, _POSITIONS, "gathered", high),
        _cells(left, y + _SHOWN * high, 4, 8, _KINDS[_SHOWN], high),
    ]


def _convolution(left: float, y: float) -> list[str]:
    start = _SHOWN * _POSITIONS // _RANKS
    words = _row(left, y, "convolution, window", "positions at the border")
    return [*words, _cells(left, y, start - _REACH, start, "gathered"), _own(left, y)]


def _recurrent(left: float, y: float) -> list[str]:
    x = left + 150 + _SHOWN * _POSITIONS // _RANKS * _CELL
    words = _row(left, y, "LSTM, scan", "the state; it sends its own on")
    return [*words, _own(left, y), *(arrow([(at - 10, y + 6.5), (at + 9, y + 6.5)]) for at in (x, x + 4 * _CELL))]


def _sums(left: float, y: float) -> list[str]:
    each = _POSITIONS // _RANKS
    others = [rank for rank in range(_RANKS) if rank != _SHOWN]
    sums = [rectangle(left + 150 + (rank * each + 1.5) * _CELL, y + 2, _CELL, _CELL - 4, "gathered") for rank in others]
    return [*_row(left, y, "mean, norm over time", "one sum of each other rank"), *sums, _own(left, y)]


_ROWS = (_gathered, _heads, _convolution, _recurrent, _sums)


def draw_longest(group: dict[str, Any]) -> str:
    """The longest sequence that trains on 1, 2 and 4 ranks, each with the same memory.

    Args:
        group: of the results of ``python -m benchmarks context --only longest``.
    """
    found = {row["contender"]: int(row["values"]["tokens"]["median"]) for row in group["rows"]}
    shapes = [text(20, 30, group["title"], "strong")]
    for place, (name, tokens) in enumerate(found.items()):
        y, wide = 50 + 32 * place, round(tokens / max(found.values()) * 420, 1)
        shapes += [text(20, y + 15, name), rectangle(180, y, wide, 20, "ours")]
        shapes.append(text(190 + wide, y + 15, f"{tokens:,} tokens", "small"))
    words = "; ".join(f"{name}: {tokens:,} tokens" for name, tokens in found.items())
    return svg(740, 60 + 32 * len(found), "The longest sequence that trains", words, shapes)


def longest_group() -> dict[str, Any] | None:
    """The results of that benchmark; None before there are any."""
    groups = [
        group
        for path in sorted(RESULTS.glob("context-cpu-*.json"))
        for group in json.loads(path.read_text(encoding="utf-8"))["groups"]
    ]
    return next((group for group in groups if "tokens" in group["rows"][0]["values"]), None)
