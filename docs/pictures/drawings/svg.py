"""What all pictures share: one style for light and dark, and the shapes they are drawn of."""

import html
from collections.abc import Iterable
from pathlib import Path

PICTURES = Path(__file__).parents[1]
RESULTS = PICTURES.parents[1] / "benchmarks" / "results"

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #59636e }
.strong { font-weight: 600 }
.middle { text-anchor: middle }
.ground { fill: #ffffff; stroke: #d1d9e0 }
.room { fill: #eff2f5 }
.parameters { fill: #0969da }
.gradients { fill: #bf8700 }
.states { fill: #1a7f37 }
.activations { fill: #8250df }
.memory { fill: #59636e }
.gathered { fill: #7cb8ff }
.temporaries { fill: #cf222e }
.chosen { fill: #bc4c00 }
.ours { fill: #0969da }
.peer { fill: #afb8c1 }
.within { fill: #ffffff; font-size: 11px }
.tiny { font-size: 11px; fill: #59636e }
.code { font: 12px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
.line { fill: none; stroke: #59636e; stroke-width: 1.3 }
.head { fill: #59636e }
.box { fill: #ffffff; stroke: #818b98 }
.pale { opacity: 0.62 }
.limit { fill: none; stroke: #d1242f; stroke-width: 1.5; stroke-dasharray: 5 4 }
.rank { fill: #ffffff; stroke: #59636e; stroke-width: 1.5 }
.tp { fill: none; stroke: #0969da; stroke-width: 3 }
.dp { fill: none; stroke: #bf8700; stroke-width: 3 }
.pp { fill: none; stroke: #1a7f37; stroke-width: 3 }
.ep { fill: none; stroke: #8250df; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .small { fill: #9198a1 }
  .ground { fill: #0d1117; stroke: #3d444d }
  .room { fill: #262c36 }
  .parameters { fill: #4493f8 }
  .gradients { fill: #d29922 }
  .states { fill: #3fb950 }
  .activations { fill: #ab7df8 }
  .memory { fill: #9198a1 }
  .gathered { fill: #a5d0ff }
  .temporaries { fill: #f47067 }
  .chosen { fill: #f0883e }
  .ours { fill: #4493f8 }
  .peer { fill: #4d5560 }
  .within { fill: #0d1117 }
  .tiny { fill: #9198a1 }
  .line { stroke: #9198a1 }
  .head { fill: #9198a1 }
  .box { fill: #151b23; stroke: #656c76 }
  .limit { stroke: #f85149 }
  .rank { fill: #0d1117; stroke: #9198a1 }
  .tp { stroke: #4493f8 }
  .dp { stroke: #d29922 }
  .pp { stroke: #3fb950 }
  .ep { stroke: #ab7df8 }
}
"""


def svg(width: int, height: int, title: str, description: str, shapes: Iterable[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-labelledby="title description">',
            f'<title id="title">{title}</title>',
            f'<desc id="description">{description}</desc>',
            f"<style>{STYLE}</style>",
            rectangle(0.5, 0.5, width - 1, height - 1, "ground", corner=8),
            *shapes,
            "</svg>\n",
        ]
    )


def rectangle(x: float, y: float, width: float, height: float, kind: str, corner: float = 0) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{corner:g}" class="{kind}"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words at a place; `words` may hold any character."""
    look = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{look}>{html.escape(words, quote=False)}</text>'


def arrow(points: Iterable[tuple[float, float]], kind: str = "line") -> str:
    """A line through `points` with a head at its last one, which is reached along an axis."""
    *before, (x0, y0), (x, y) = points
    across, down = (x > x0) - (x < x0), (y > y0) - (y < y0)
    path = "M" + "L".join(f"{a:g} {b:g}" for a, b in [*before, (x0, y0), (x - 4 * across, y - 4 * down)])
    side = [(x - 7 * across + 3.5 * turn * down, y - 7 * down + 3.5 * turn * across) for turn in (-1, 1)]
    head = " ".join(f"{a:g},{b:g}" for a, b in [(x, y), *side])
    return f'<path d="{path}" class="{kind}"/><polygon points="{head}" class="head"/>'
