"""Runs as text for a terminal: a table with a column for each run."""

import textwrap
from collections.abc import Iterable, Sequence

import numpy as np

from tensorshard.common.words import fit, size_text
from tensorshard.report.figures import Rows, differences, figures, is_compared, notes
from tensorshard.report.read_run import Run, Series, columns

_GAP = 2
_NARROWEST = 22  # the fewest columns of a run; if fewer are left, further runs follow below
_RANKS_SHOWN = 16
_DIFFERENCES_SHOWN = 20
_BLOCKS = "▁▂▃▄▅▆▇█"


def describe(runs: Sequence[Run], width: int | None, *, blocks: bool = True) -> str:
    """A table of the runs. Below it, for a single run, the memory of its ranks and its plan; for several runs, their
    differences.

    Args:
        width: columns of the terminal; None for lines of any length.
        blocks: whether the loss is also drawn with block characters, which some terminals lack.
    """
    rows = figures(runs)
    if blocks:
        at = next((number for number, (name, _) in enumerate(rows, start=1) if name == "loss"), None)
        if at is not None:
            rows.insert(at, ("", [_curve(run.metrics["loss"]) if "loss" in run.metrics else "" for run in runs]))
    heads = [run.name for run in runs]
    parts = [_table("run", heads, rows, width)]
    parts += ["\n".join(fit(note, width) for note in notes(runs))]
    if len(runs) == 1:
        parts += [_ranks(runs[0]), _plan(runs[0], width)]
    elif different := differences(runs):
        more = len(different) - _DIFFERENCES_SHOWN
        parts.append(_table("what differs", heads, different[:_DIFFERENCES_SHOWN], width))
        parts += [f"and {more} settings more; --html shows them all"] * (more > 0)
    return "\n\n".join(part for part in parts if part)


def _table(corner: str, heads: Sequence[str], rows: Rows, width: int | None) -> str:
    """`rows` below `heads`. Runs that do not fit side by side follow in another table below."""
    label = max(len(corner), *(len(name) for name, _ in rows)) + _GAP
    most = len(heads) if width is None else max(1, (width - label) // (_NARROWEST + _GAP))
    tables = []
    for first in range(0, len(heads), most):
        shown = slice(first, first + most)
        shown_rows = [(corner, list(heads[shown])), *((name, cells[shown]) for name, cells in rows)]
        count = len(shown_rows[0][1])
        room = None if width is None else max(_NARROWEST, (width - label) // count - _GAP)
        tables.append("\n".join(_lines(shown_rows, label, room)))
    return "\n\n".join(tables)


def _lines(rows: Rows, label: int, room: int | None) -> Iterable[str]:
    broken = [(name, [_broken(cell, room) for cell in cells]) for name, cells in rows]
    count = len(rows[0][1])
    widths = [max(len(line) for _, cells in broken for line in cells[number]) + _GAP for number in range(count)]
    for name, cells in broken:
        for number in range(max(map(len, cells))):
            parts = [name if number == 0 else ""]
            parts += [cell[number] if number < len(cell) else "" for cell in cells]
            yield "".join(part.ljust(size) for part, size in zip(parts, [label, *widths], strict=True)).rstrip()


def _broken(cell: str, room: int | None) -> list[str]:
    return [cell] if room is None else textwrap.wrap(cell, room, break_on_hyphens=False) or [""]


def _curve(series: Series) -> str:
    """`series` as one line of block characters, each as high as the mean of its steps."""
    means = columns(series, _NARROWEST, int(series.steps[0]), int(series.steps[-1])).means
    low, high = means.min(), means.max()
    if len(means) < 2 or low == high:
        return ""
    heights = np.rint((means - low) / (high - low) * (len(_BLOCKS) - 1)).astype(int)
    return "".join(_BLOCKS[height] for height in heights)


def _ranks(run: Run) -> str:
    """The memory of every rank, if there are several ranks but not too many."""
    peaks = run.peaks
    if not 1 < len(peaks) <= _RANKS_SHOWN:
        return ""
    heads, sides = ["peak memory"], [peaks]
    if len(run.predicted) == len(peaks):
        heads.append("predicted")
        sides.append(run.predicted)
    for head, sizes in (("beyond start", run.beyond_start), ("estimated", run.estimated)):
        if is_compared(run) and sizes != peaks:
            heads.append(head)
            sides.append(sizes)
    lines = ["rank  " + "  ".join(f"{head:>12}" for head in heads)]
    for rank in range(len(peaks)):
        lines.append(f"{rank:>4}  " + "  ".join(f"{size_text(sizes[rank]):>12}" for sizes in sides))
    return "\n".join(lines)


def _plan(run: Run, width: int | None) -> str:
    return "" if run.plan is None else fit(run.plan.describe(), width)
