"""The page of an estimate, of measured memory, or of both side by side: one HTML file that needs nothing else."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensorshard.estimate.chart import kind, stacked_chart
from tensorshard.estimate.page_style import STYLE
from tensorshard.estimate.rank_estimate import CATEGORIES, RankEstimate
from tensorshard.estimate.sizes import size_text
from tensorshard.mesh import coordinates
from tensorshard.pipeline.run.draw_schedule import timeline
from tensorshard.plan import AXES, Plan

_RANKS_DRAWN = 64
_MICRO_BATCHES_DRAWN = 32


@dataclass(frozen=True)
class Side:
    """One of the columns of the page.

    Args:
        name: "estimated" or "measured".
        ranks: one for each stage.
        notes: what its numbers are, and what they are not.
    """

    name: str
    ranks: Sequence[RankEstimate]
    notes: Sequence[str]


def page(plan: Plan, world_size: int, sides: Sequence[Side], verdict: str = "") -> str:
    """The page, as HTML.

    Args:
        plan: with every axis set.
        sides: what is shown side by side.
        verdict: whether it fits, if that is known.
    """
    stages = sorted({rank.stage for side in sides for rank in side.ranks})
    fits = "" if not verdict else f'<p class="verdict {"good" if verdict.startswith("fits") else "bad"}">{_e(verdict)}'
    body = [f"<h1>Memory of a plan on {world_size} rank{'s' * (world_size > 1)}</h1>", fits, _legend(sides)]
    for stage in stages:
        body.append(_stage(stage, len(stages) > 1, sides))
    body += ["<h2>The plan</h2>", f"<pre>{_e(plan.describe())}</pre>", _mesh(plan, world_size), _schedule(plan)]
    body += ["<h2>What these numbers are</h2><ul>"]
    body += [f"<li><b>{side.name}</b>: {_e(note)}" for side in sides for note in side.notes]
    body.append("</ul>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Memory of a plan</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _stage(stage: int, several: bool, sides: Sequence[Side]) -> str:
    shown = [(side.name, rank) for side in sides for rank in side.ranks if rank.stage == stage]
    top = max(rank.peak_allocated for _, rank in shown)
    parts = [f"<h2>{f'Stage {stage}' if several else 'Memory over the steps'}</h2>", '<div class="sides">']
    for name, rank in shown:
        title = f"{name}, rank {rank.rank}: at most {size_text(rank.peak_allocated)} of live tensors, in {rank.phase}"
        parts += [f"<figure><figcaption>{_e(title)}</figcaption>", stacked_chart(rank.history, top, title), "</figure>"]
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
            f"<tr><td>{count}{size_text(tensor.nbytes)}<td>{_key(tensor.category)}<td>{shape}<td>{_e(made)} "
            f"in {tensor.phase}"
        )
    return "\n".join([*lines, "</table>"])


def _legend(sides: Sequence[Side]) -> str:
    used = [name for name in CATEGORIES if any(rank.by_category[name] for side in sides for rank in side.ranks)]
    return f'<p class="legend">{" ".join(map(_key, used))}</p>'


def _key(category: str) -> str:
    return f'<span class="key {kind(category)}"></span>{category}'


def _mesh(plan: Plan, world_size: int) -> str:
    """The ranks: a box for each stage, in it a row for each data rank, of the ranks that split its layers."""
    degrees = {axis: getattr(plan, axis) for axis in AXES}
    shown = min(world_size, _RANKS_DRAWN)
    stages: dict[int, dict[tuple[int, int], list[int]]] = {}
    for rank in range(shown):
        at = coordinates(rank, degrees)
        stages.setdefault(at["pp"], {}).setdefault((at["dp_replicate"], at["dp_shard"]), []).append(rank)
    parts = ["<h2>The mesh</h2>", '<div class="mesh">']
    for stage, rows in stages.items():
        parts.append(f'<div class="room"><b>{f"stage {stage}" if plan.pp > 1 else "all layers"}</b>')
        for (replica, shard), ranks in rows.items():
            where = f"dp_replicate {replica}, dp_shard {shard}"
            boxes = "".join(f'<span class="rank">{rank}</span>' for rank in ranks)
            parts.append(f'<div class="row" title="{where}">{boxes}</div>')
        parts.append("</div>")
    parts.append("</div>")
    words = "A number is a rank. Ranks of a row have the same samples and split each layer (tp); rows have others (dp)."
    more = f" The first {shown} of {world_size} ranks are drawn." if shown < world_size else ""
    return "\n".join([*parts, f"<p>{words}{more}"])


def _schedule(plan: Plan) -> str:
    if plan.pp == 1:
        return ""
    count = min(plan.micro_batches, _MICRO_BATCHES_DRAWN)
    drawn = timeline(plan.pp_schedule, ranks=plan.pp, stages_per_rank=plan.stages_per_rank, micro_batches=count)
    words = "" if count == plan.micro_batches else f"<p>Of {plan.micro_batches} micro-batches, {count} are drawn."
    return f'<h2>The schedule</h2><div class="schedule">{drawn.svg()}</div>{words}'


def _e(text: str) -> str:
    return html.escape(text)
