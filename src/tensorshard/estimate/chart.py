"""Charts of memory as SVG, for the page of an estimate. Colours are those of the page's classes."""

import html
from collections.abc import Sequence
from itertools import groupby

from tensorshard.estimate.history import Moment
from tensorshard.estimate.rank_estimate import CATEGORIES
from tensorshard.estimate.sizes import size_text

_LEFT, _TOP, _WIDE, _HIGH, _BELOW = 74, 12, 600, 190, 34


def kind(category: str) -> str:
    """The CSS class of a category."""
    return category.replace(" ", "-")


def stacked_chart(moments: Sequence[Moment], top: int, title: str) -> str:
    """Memory over steps, stacked by category.

    Args:
        moments: in order; each is as wide as any other.
        top: bytes at the top of the scale.
        title: what is drawn, for readers who hear it.
    """
    step = _WIDE / max(1, len(moments))
    floor = _TOP + _HIGH
    parts = [f'<svg viewBox="0 0 {_LEFT + _WIDE + 8} {floor + _BELOW}" role="img" aria-label="{html.escape(title)}">']
    for quarter in range(5):
        y = floor - _HIGH * quarter / 4
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDE}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="end">{size_text(top * quarter / 4)}</text>')
    below = [0] * len(moments)
    for index, category in enumerate(CATEGORIES):
        above = [low + moment.held[index] for low, moment in zip(below, moments, strict=True)]
        if above != below:
            upper = _steps(above, top, step, floor)
            lower = _steps(below, top, step, floor)[::-1]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *lower])
            parts.append(f'<polygon points="{points}" class="{kind(category)}"><title>{category}</title></polygon>')
        below = above
    parts += _phases(moments, step, floor)
    return "\n".join([*parts, "</svg>"])


def _steps(heights: Sequence[int], top: int, step: float, floor: float) -> list[tuple[float, float]]:
    points = []
    for index, height in enumerate(heights):
        y = floor - _HIGH * height / max(1, top)
        points += [(_LEFT + index * step, y), (_LEFT + (index + 1) * step, y)]
    return points


def _phases(moments: Sequence[Moment], step: float, floor: float) -> list[str]:
    """A strip below the chart that says what is going on; words stand where there is room for them."""
    parts, start = [], 0
    for phase, group in groupby(moments, key=lambda moment: moment.phase):
        count = len(list(group))
        x, wide = _LEFT + start * step, count * step
        parts.append(
            f'<rect x="{x:.1f}" y="{floor + 4}" width="{wide:.1f}" height="6" class="phase {phase}">'
            f"<title>{phase}</title></rect>"
        )
        if wide > 52:
            parts.append(f'<text x="{x + wide / 2:.1f}" y="{floor + 24}" class="middle">{phase}</text>')
        start += count
    return parts
