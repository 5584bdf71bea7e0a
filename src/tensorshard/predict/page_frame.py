"""The common parts of all pages. Each is one HTML file that needs no other, light or dark as the reader's system is."""

from collections.abc import Iterable
from html import escape

from tensorshard.plan.mesh_coordinates import coordinates
from tensorshard.plan.plan import AXES, Plan
from tensorshard.predict.page_style import STYLE

_RANKS_DRAWN = 64
_MICRO_BATCHES_DRAWN = 32


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """A page, as HTML.

    Args:
        title: the title as plain text; the visible heading is in `body`.
        body: the page's parts as HTML, in order; empty ones are left out.
        style: CSS rules for this page alone.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def plan_section(plan: Plan, world_size: int, heading: str = "h2") -> list[str]:
    """The plan in words, its mesh and its schedule, as HTML.

    Args:
        plan: with every axis set.
        heading: the tag of its headings.
    """
    return [
        f"<{heading}>The plan</{heading}>",
        f"<pre>{escape(plan.describe())}</pre>",
        f"<{heading}>The mesh</{heading}>",
        _mesh(plan, world_size),
        *([f"<{heading}>The schedule</{heading}>", _schedule(plan)] if plan.pp > 1 else []),
    ]


def _mesh(plan: Plan, world_size: int) -> str:
    """A picture of the ranks: a box for each stage, and in it a row for each data rank with its cp and tp ranks."""
    degrees = {axis: getattr(plan, axis) for axis in AXES}
    shown = min(world_size, _RANKS_DRAWN)
    stages: dict[int, dict[tuple[int, int], list[int]]] = {}
    for rank in range(shown):
        at = coordinates(rank, degrees)
        stages.setdefault(at["pp"], {}).setdefault((at["dp_replicate"], at["dp_shard"]), []).append(rank)
    parts = ['<div class="mesh">']
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
    from tensorshard.pipeline.run.draw_schedule import timeline  # imported late, since it imports torch

    count = min(plan.micro_batches, _MICRO_BATCHES_DRAWN)
    drawn = timeline(plan.pp_schedule, ranks=plan.pp, stages_per_rank=plan.stages_per_rank, micro_batches=count)
    words = "" if count == plan.micro_batches else f"<p>Of {plan.micro_batches} micro-batches, {count} are drawn."
    return f'<div class="schedule">{drawn.svg()}</div>{words}'
