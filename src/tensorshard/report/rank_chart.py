"""The memory of every rank as bars, with the estimate as a line on each."""

from collections.abc import Sequence
from html import escape

from tensorshard.common.quantities import size_text
from tensorshard.report.axes import BELOW, HIGH, LEFT, TOP, WIDE, Scale, frame

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
