"""The page of an estimate, of measured memory, or of both side by side: one HTML file that needs nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from tensorshard.common.quantities import size_text
from tensorshard.plan.plan import Plan
from tensorshard.predict.chart import chart_title, kind, stacked_chart
from tensorshard.predict.page_frame import document, plan_section
from tensorshard.predict.rank_estimate import CATEGORIES, RankEstimate


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
