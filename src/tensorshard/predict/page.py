"""The page of an estimate, of measured memory, or of both side by side: one HTML file that needs nothing else.

Also here: charts of memory as SVG, for the page of an estimate. The page's CSS classes give the colours.
"""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from tensorshard.common.words import size_text
from tensorshard.plan.plan import Plan
from tensorshard.predict.page_frame import CHART, CHART_STYLE, document, plan_section
from tensorshard.predict.rank_estimate import CATEGORIES, Moment, RankEstimate

_LEFT, _TOP, _WIDE, _HIGH, _BELOW = 74, 12, 600, 190, 34


@dataclass(frozen=True)
class Side:
    """One of the columns of the page.

    Args:
        name: "estimated" or "measured".
        ranks: one for each stage.
        notes: sentences that say what the numbers include, and what they do not.
    """

    name: str
    ranks: Sequence[RankEstimate]
    notes: Sequence[str]


def page(plan: Plan, world_size: int, sides: Sequence[Side], verdict: str = "") -> str:
    """The page, as HTML.

    Args:
        plan: with every axis set.
        sides: the columns, side by side.
        verdict: whether it fits, if that is known.
    """
    stages = sorted({rank.stage for side in sides for rank in side.ranks})
    fits = (
        "" if not verdict else f'<p class="verdict {"good" if verdict.startswith("fits") else "bad"}">{escape(verdict)}'
    )
    body = [f"<h1>Memory of a plan on {world_size} rank{'s' * (world_size > 1)}</h1>", fits, _legend(sides)]
    for stage in stages:
        body.append(_stage(stage, len(stages) > 1, sides))
    body += plan_section(plan, world_size)
    body += ["<h2>What these numbers are</h2><ul>"]
    body += [f"<li><b>{side.name}</b>: {escape(note)}" for side in sides for note in side.notes]
    body.append("</ul>")
    return document("Memory of a plan", body)


def _stage(stage: int, several: bool, sides: Sequence[Side]) -> str:
    shown = [(side.name, rank) for side in sides for rank in side.ranks if rank.stage == stage]
    top = max(rank.peak_allocated for _, rank in shown)
    parts = [f"<h2>{f'Stage {stage}' if several else 'Memory over the steps'}</h2>", '<div class="sides">']
    for name, rank in shown:
        title = chart_title(name, rank)
        parts += [
            f"<figure><figcaption>{escape(title)}</figcaption>",
            stacked_chart(rank.history, top, title),
            "</figure>",
        ]
    parts += ["</div>", _numbers(shown)]
    for name, rank in shown:
        parts.append(_largest(name, rank))
    return "\n".join(parts)


def _numbers(shown: Sequence[tuple[str, RankEstimate]]) -> str:
    heads = "".join(f"<th>{name}" for name, _ in shown)
    lines = [f'<table class="numbers"><tr><th>at the peak{heads}']
    for category in CATEGORIES:
        sizes = [rank.by_category[category] for _, rank in shown]
        if any(sizes):
            lines.append(f"<tr><td>{_key(category)}{_cells(sizes)}")
    lines.append(f"<tr class=sum><td>live tensors{_cells([rank.peak_allocated for _, rank in shown])}")
    lines.append(f"<tr><td>reserved{_cells([rank.peak_reserved for _, rank in shown])}")
    lines.append(f"<tr><td>on the device{_cells([rank.peak_device for _, rank in shown])}")
    return "\n".join([*lines, "</table>"])


def _cells(sizes: Iterable[int]) -> str:
    return "".join(f"<td>{size_text(size)}" for size in sizes)


def _largest(name: str, rank: RankEstimate) -> str:
    lines = [
        f"<h3>Largest tensors then, {name}</h3>",
        '<table class="tensors"><tr><th>bytes<th>for<th>shape<th>made by',
    ]
    for tensor in rank.largest:
        count = f"{tensor.count} &times; " if tensor.count > 1 else ""
        shape = f"[{', '.join(map(str, tensor.shape))}] {tensor.dtype}"
        made = f"{tensor.line}, {tensor.operation}" if tensor.line else tensor.operation
        lines.append(
            f"<tr><td>{count}{size_text(tensor.nbytes)}<td>{_key(tensor.category)}<td>{shape}<td>{escape(made)} "
            f"in {tensor.phase}"
        )
    return "\n".join([*lines, "</table>"])


def _legend(sides: Sequence[Side]) -> str:
    used = [name for name in CATEGORIES if any(rank.by_category[name] for side in sides for rank in side.ranks)]
    return f'<p class="legend">{" ".join(map(_key, used))}</p>'


def _key(category: str) -> str:
    return f'<span class="key {kind(category)}"></span>{category}'


def kind(category: str) -> str:
    """The CSS class of a category."""
    return category.replace(" ", "-")


def stacked_chart(moments: Sequence[Moment], top: int, title: str) -> str:
    """Memory over steps, stacked by category.

    Args:
        moments: in order, all drawn with the same width.
        top: bytes at the top of the scale.
        title: what is drawn, for screen readers.
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


def chart_title(name: str, rank: RankEstimate) -> str:
    """The title of the chart of `rank`; `name` is "estimated" or "measured"."""
    return f"{name}, rank {rank.rank}: at most {size_text(rank.peak_allocated)} of live tensors, in {rank.phase}"


def picture(name: str, rank: RankEstimate) -> str:
    """The chart of `rank` as a picture of its own, with a title, a legend, colours and a background."""
    title = chart_title(name, rank)
    width, height = _LEFT + _WIDE + 8, _TOP + _HIGH + _BELOW
    keys, head = _chart_legend(rank, width)
    chart = stacked_chart(rank.history, rank.peak_allocated, title)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + head}" width="{width}" '
        f'class="{CHART}" role="img" aria-label="{html.escape(title)}">',
        f"<style>{CHART_STYLE}</style>",
        '<rect width="100%" height="100%" class="ground"/>',
        f'<text x="12" y="22">{html.escape(title)}</text>',
        *keys,
        chart.replace("<svg ", f'<svg y="{head}" width="{width}" height="{height}" ', 1),
    ]
    return "\n".join([*parts, "</svg>"])


def _chart_legend(rank: RankEstimate, width: int) -> tuple[list[str], int]:
    """The legend of a picture of the given width, and the height at which it ends."""
    parts, x, y = [], 12, 44
    for index, category in enumerate(CATEGORIES):
        if not any(moment.held[index] for moment in rank.history):
            continue
        wide = 32 + round(6.4 * len(category))
        if x + wide > width:
            x, y = 12, y + 18
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="3" class="{kind(category)}"/>')
        parts.append(f'<text x="{x + 17}" y="{y}">{category}</text>')
        x += wide
    return parts, y + 8


def _steps(heights: Sequence[int], top: int, step: float, floor: float) -> list[tuple[float, float]]:
    points = []
    for index, height in enumerate(heights):
        y = floor - _HIGH * height / max(1, top)
        points += [(_LEFT + index * step, y), (_LEFT + (index + 1) * step, y)]
    return points


def _phases(moments: Sequence[Moment], step: float, floor: float) -> list[str]:
    """A strip below the chart that shows the phases, with their names where there is room."""
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
