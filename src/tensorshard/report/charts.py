"""Charts of a run, as SVG: lines over steps, and bars of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from tensorshard.common.quantities import size_text
from tensorshard.report.axes import BELOW, HIGH, LEFT, TOP, WIDE, Scale, frame, round_values, scale_of
from tensorshard.report.series import Columns, Series, columns

_BARS = 150  # if there are more ranks, several share a bar, which is as high as the fullest of them
_WIDEST = 60


def rank_chart(measured: Sequence[int], estimated: Sequence[int], title: str, colour: int = 0) -> str:
    """The chart.

    Args:
        measured: measured bytes of each rank.
        estimated: estimated bytes of each rank; empty without an estimate.
        title: what is drawn, for screen readers.
        colour: the number of the bars' colour.
    """
    top = max([*measured, *estimated, 1])
    scale = Scale(0, top * 1.05, in_bytes=True)
    parts = [f'<svg viewBox="0 0 {LEFT + WIDE + 8} {TOP + HIGH + BELOW}" role="img" aria-label="{escape(title)}">']
    parts += frame(scale, size_text)
    each = -(-len(measured) // _BARS)
    groups = [range(first, min(first + each, len(measured))) for first in range(0, len(measured), each)]
    apart = WIDE / len(groups)
    wide = min(apart * 0.8, _WIDEST)
    every = next(every for every in (1, 2, 5, 10, 20, 50, 100) if len(groups) / every <= 16)
    for number, ranks in enumerate(groups):
        x = LEFT + (number + 0.5) * apart
        held = max(measured[rank] for rank in ranks)
        y = scale.y(held)
        words = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        said = f"{words}: {size_text(held)}"
        if estimated:
            said += f", estimated {size_text(max(estimated[rank] for rank in ranks))}"
        parts.append(
            f'<rect x="{x - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{TOP + HIGH - y:.1f}" '
            f'class="bar run-{colour}"><title>{escape(said)}</title></rect>'
        )
        if estimated:
            line = scale.y(max(estimated[rank] for rank in ranks))
            parts.append(f'<path d="M{x - wide / 2 - 2:.1f} {line:.1f}h{wide + 4:.1f}" class="estimated"/>')
        if number % every == 0:
            parts.append(f'<text x="{x:.1f}" y="{TOP + HIGH + 18}" class="middle">{ranks[0]}</text>')
    return "\n".join([*parts, f'<path d="M{LEFT} {TOP + HIGH}h{WIDE}" class="grid"/>', "</svg>"])


_POINTS = 600  # columns of a chart, of all its lines together
_FEWEST = 150  # columns of one line
_STRIPS = 75  # parts of a chart, each of which shows its numbers when the mouse is over it
_DOTS = 80  # points are marked if there are at most so many


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Args:
        name: the name that the chart shows for it.
        colour: the number of its colour.
        dotted: whether its points are marked, if there are not too many.
    """

    name: str
    series: Series
    colour: int
    dotted: bool = False


def line_chart(
    lines: Sequence[Line],
    span: tuple[int, int],
    title: str,
    spell: Callable[[float], str],
    *,
    from_zero: bool = False,
    in_bytes: bool = False,
) -> str:
    """The chart. If a line has more steps than columns, it shows the mean of each column, over an area from the least
    value to the most.

    Args:
        lines: none of them empty.
        span: the first and the last step of the axis.
        title: what is drawn, for screen readers.
        spell: writes a value as text.
        from_zero, in_bytes: as for :func:`scale_of`.
    """
    values = np.concatenate([line.series.values for line in lines])
    low, median, high = (float(np.quantile(values, part)) for part in (0.0, 0.5, 1.0))
    scale = scale_of(low, high, median, from_zero=from_zero, in_bytes=in_bytes)
    count = max(_FEWEST, _POINTS // len(lines))
    parts = [f'<svg viewBox="0 0 {LEFT + WIDE + 8} {TOP + HIGH + BELOW}" role="img" aria-label="{escape(title)}">']
    parts += frame(scale, spell)
    parts += _steps(span)
    for line in lines:
        parts += _drawn(line, span, scale, count)
    parts += _spoken(lines, span, spell)
    return "\n".join([*parts, "</svg>"])


def _steps(span: tuple[int, int]) -> list[str]:
    """The axis of steps."""
    first, last = span
    if first == last:
        return [f'<text x="{LEFT + WIDE / 2}" y="{TOP + HIGH + 22}" class="middle">step {first:,}</text>']
    parts = [f'<path d="M{LEFT} {TOP + HIGH}h{WIDE}" class="grid"/>']
    for step in round_values(first, last):
        if step == int(step):
            x = LEFT + WIDE * (step - first) / (last - first)
            word = "middle" if x < LEFT + WIDE - 20 else "end"
            parts.append(f'<text x="{x:.1f}" y="{TOP + HIGH + 22}" class="{word}">{int(step):,}</text>')
    return parts


def _drawn(line: Line, span: tuple[int, int], scale: Scale, count: int) -> list[str]:
    first, last = span
    series = line.series
    name = f"<title>{escape(line.name)}</title>"
    if len(series) <= count:
        at = LEFT + WIDE * ((series.steps - first) / (last - first) if last > first else series.steps * 0 + 0.5)
        points = [(float(x), scale.y(float(value))) for x, value in zip(at, series.values, strict=True)]
        parts = [f'<path d="{_path(points)}" class="line run-{line.colour}">{name}</path>'] if len(points) > 1 else []
        if len(points) == 1 or (line.dotted and len(points) <= _DOTS):
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="dot run-{line.colour}"/>' for x, y in points]
        return parts
    found = columns(series, count, first, last)
    width = WIDE / count
    middles = [LEFT + (float(place) + 0.5) * width for place in found.places]
    means = [(x, scale.y(float(mean))) for x, mean in zip(middles, found.means, strict=True)]
    return [
        f'<path d="{_outline(found, middles, scale)}z" class="spread run-{line.colour}"/>',
        f'<path d="{_path(means)}" class="line run-{line.colour}">{name}</path>',
    ]


def _outline(found: Columns, middles: Sequence[float], scale: Scale) -> str:
    """A path along the most of each column to the right, and back along the least."""
    above = [(x, scale.y(float(high))) for x, high in zip(middles, found.highs, strict=True)]
    below = [(x, scale.y(float(low))) for x, low in zip(middles, found.lows, strict=True)]
    return _path([*above, *below[::-1]])


def _path(points: Sequence[tuple[float, float]]) -> str:
    (x, y), *rest = points
    return f"M{x:.1f} {y:.1f}L" + " ".join(f"{x:.1f} {y:.1f}" for x, y in rest)


def _spoken(lines: Sequence[Line], span: tuple[int, int], spell: Callable[[float], str]) -> list[str]:
    """Invisible strips over the chart. Each shows the numbers below it as a tooltip."""
    first, last = span
    count = min(_STRIPS, last - first + 1)
    said: list[list[str]] = [[] for _ in range(count)]
    for line in lines:
        found = columns(line.series, count, first, last)
        for place, low, mean, high in zip(found.places, found.lows, found.means, found.highs, strict=True):
            spread = (
                f" ({spell(float(low))} to {spell(float(high))})" if spell(float(low)) != spell(float(high)) else ""
            )
            said[int(place)].append(f"{line.name}: {spell(float(mean))}{spread}")
    parts = []
    for number, words in enumerate(said):
        if words:
            start = first - (-number * (last - first + 1) // count)
            end = first - (-(number + 1) * (last - first + 1) // count) - 1
            steps = f"step {start:,}" if start == end else f"steps {start:,} to {end:,}"
            x, wide = LEFT + WIDE * number / count, WIDE / count
            text = escape("\n".join([steps, *words]))
            shape = f'x="{x:.1f}" y="{TOP}" width="{wide:.1f}" height="{HIGH}"'
            parts.append(f'<rect {shape} class="strip"><title>{text}</title></rect>')
    return parts
