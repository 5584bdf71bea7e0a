"""The common parts of all pages. Each is one HTML file that needs no other, light or dark as the reader's system is."""

from collections.abc import Iterable
from html import escape

from tensorshard.plan.plan import AXES, Plan, coordinates

# What is held has these colours in the pictures of the README, too (docs/pictures/drawings/svg.py).
_LIGHT = {
    "parameters": "#0969da", "gathered-parameters": "#7cb8ff", "gradients": "#bf8700", "optimizer-states": "#1a7f37",
    "activations": "#8250df", "inputs": "#6e7781", "temporaries": "#cf222e",
}  # fmt: skip
_DARK = {
    "parameters": "#4493f8", "gathered-parameters": "#a5d0ff", "gradients": "#d29922", "optimizer-states": "#3fb950",
    "activations": "#ab7df8", "inputs": "#9198a1", "temporaries": "#f47067",
}  # fmt: skip

_RULES = """
body { margin: 0; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif;
  color: var(--text); background: var(--ground) }
main { max-width: 1440px; margin: 0 auto; padding: 8px 24px 48px }
h1 { font-size: 24px } h2 { font-size: 18px; margin: 32px 0 8px } h3 { font-size: 15px; margin: 20px 0 4px }
pre { background: var(--room); padding: 12px; border-radius: 6px; overflow-x: auto }
.verdict { font-size: 18px; font-weight: 600 }
.good { color: var(--good) } .bad { color: var(--bad) }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px }
figure { margin: 0; max-width: 760px } figcaption { font-weight: 600 }
figure svg { width: 100%; height: auto }
.schedule svg text { fill: #1f2328 }
.legend { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: center }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin: 0 6px -1px 0 }
table { border-collapse: collapse; margin: 8px 0; display: block; overflow-x: auto }
th, td { text-align: left; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--line); white-space: nowrap }
.numbers td:not(:first-child), .numbers th:not(:first-child), .tensors td:first-child { text-align: right }
.sum { font-weight: 600 }
.mesh { display: flex; flex-wrap: wrap; gap: 12px }
.room { background: var(--room); border-radius: 8px; padding: 8px 12px }
.rank { display: inline-block; min-width: 22px; padding: 2px 6px; margin: 2px; text-align: center; border-radius: 5px;
  border: 1px solid var(--soft); background: var(--ground) }
.schedule { overflow-x: auto }
@media (max-width: 600px) {
  main { padding: 8px 14px 32px } h1 { font-size: 20px } h1, figcaption, p { overflow-wrap: anywhere }
  pre { white-space: pre-wrap } th, td { padding-right: 10px }
  figure { overflow-x: auto } figure svg { min-width: 560px } figure svg text { font-size: 14px }
}
"""


# Rules for charts. WITHIN is replaced by the selector of what the chart is in.
_CHART_RULES = """
WITHIN text { font-size: 12px; fill: var(--soft) }
WITHIN .end { text-anchor: end } WITHIN .middle { text-anchor: middle }
WITHIN .grid { stroke: var(--line); fill: none }
WITHIN .phase { fill: var(--line) } WITHIN .forward { fill: var(--soft) } WITHIN .update { fill: var(--text) }
"""


def _variables(where: str, text: str, soft: str, ground: str, room: str, line: str, good: str, bad: str) -> str:
    values = {"text": text, "soft": soft, "ground": ground, "room": room, "line": line, "good": good, "bad": bad}
    return f"{where} {{ {'; '.join(f'--{name}: {value}' for name, value in values.items())} }}"


def _light(where: str) -> str:
    return _variables(where, "#1f2328", "#59636e", "#ffffff", "#f6f8fa", "#d1d9e0", "#1a7f37", "#cf222e")


def _dark(where: str) -> str:
    return _variables(where, "#e6edf3", "#9198a1", "#0d1117", "#161b22", "#3d444d", "#3fb950", "#f47067")


def _colours(colours: dict[str, str], within: str = "") -> str:
    return "\n".join(f"{within}.{name} {{ fill: {colour}; background: {colour} }}" for name, colour in colours.items())


def _in_both(light: list[str], dark: list[str]) -> str:
    return "\n".join([*light, "@media (prefers-color-scheme: dark) {", *dark, "}"])


STYLE = _in_both(
    [_light(":root"), _RULES, _CHART_RULES.replace("WITHIN", "svg"), _colours(_LIGHT)],
    [_dark(":root"), _colours(_DARK)],
)
"""The style of a page."""

CHART = "tensorshard-chart"
"""The CSS class of charts that stand alone. Their own rules apply inside it, so that they look the same anywhere."""

CHART_STYLE = _in_both(
    [
        _light(f".{CHART}"),
        f'.{CHART} {{ font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }}',
        f".{CHART} .ground {{ fill: var(--ground) }}",
        _CHART_RULES.replace("WITHIN", f".{CHART}"),
        _colours(_LIGHT, f".{CHART} "),
    ],
    [_dark(f".{CHART}"), _colours(_DARK, f".{CHART} ")],
)
"""The style of a chart that stands alone."""


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
    """A picture of the ranks: a box for each stage, and in it a row for each data rank with its cp and tp ranks. Beside
    each rank, which part of the experts it has, if they are split."""
    degrees = {axis: getattr(plan, axis) for axis in AXES}
    shown = min(world_size, _RANKS_DRAWN)
    stages: dict[int, dict[tuple[int, int], list[str]]] = {}
    for rank in range(shown):
        at = coordinates(rank, degrees)
        part = (at["dp_shard"] * plan.cp + at["cp"]) % plan.ep + 1
        text = f"{rank}<sub>e{part}</sub>" if plan.ep > 1 else str(rank)
        stages.setdefault(at["pp"], {}).setdefault((at["dp_replicate"], at["dp_shard"]), []).append(text)
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
    words += f" e1 to e{plan.ep} are the parts of the experts." if plan.ep > 1 else ""
    more = f" The first {shown} of {world_size} ranks are drawn." if shown < world_size else ""
    return "\n".join([*parts, f"<p>{words}{more}"])


def _schedule(plan: Plan) -> str:
    from tensorshard.pipeline.run.draw_schedule import timeline  # imported late, since it imports torch

    count = min(plan.micro_batches, _MICRO_BATCHES_DRAWN)
    drawn = timeline(plan.pp_schedule, ranks=plan.pp, stages_per_rank=plan.stages_per_rank, micro_batches=count)
    words = "" if count == plan.micro_batches else f"<p>Of {plan.micro_batches} micro-batches, {count} are drawn."
    return f'<div class="schedule">{drawn.svg()}</div>{words}'
