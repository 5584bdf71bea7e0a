"""The page of one run or of several side by side: one HTML file that needs nothing else.

Also here: charts of a run, as SVG: lines over steps, and bars of ranks.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from tensorshard.common.words import format_count, size_text
from tensorshard.predict.page_frame import document, plan_section
from tensorshard.report.figures import Rows, differences, figures, is_compared, notes, others, scores, speed_of
from tensorshard.report.read_run import MOST_RUNS, Columns, Run, Series, columns

_COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#1b7c83", "#9a6700", "#6e7781")
_DARK_COLOURS = ("#4493f8", "#f0883e", "#3fb950", "#b083f0", "#f778ba", "#39c5cf", "#d29922", "#9198a1")
assert len(_COLOURS) == len(_DARK_COLOURS) == MOST_RUNS

_RULES = """
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; background: none }
.spread { opacity: 0.22 }
.bar { opacity: 0.8 }
.estimated { stroke: var(--text); stroke-width: 2.5 }
.strip { fill: transparent } .strip:hover { fill: var(--soft); fill-opacity: 0.15 }
.name { font-weight: 400; color: var(--soft) }
.curves figure { margin-bottom: 8px }
.curves { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)) }
td { vertical-align: top }
.figures td:not(:first-child) { min-width: 130px; white-space: normal }
.mark { display: inline-block; width: 14px; border-top: 2.5px solid var(--text); margin: 0 6px 4px 0 }
"""
# The frame of a chart: its scale, and the values that are written beside it.

LEFT, TOP, WIDE, HIGH, BELOW = 74, 10, 600, 190, 30
"""Sizes of a chart, in its own units: the frame's place and size, and the room below it for steps."""

_MOST_TICKS = 6
_ZEROS = re.compile(r"\.0+(?!\d)")  # of "20.0 GiB"


def run_page(runs: Sequence[Run]) -> str:
    """The page, as HTML."""
    title = f"The run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    body = [
        f"<h1>{escape(title)}</h1>",
        _legend(runs) if len(runs) > 1 else "",
        _table("figures", runs, figures(runs)),
        *(f"<p>{escape(note)}</p>" for note in notes(runs)),
    ]
    charts = list(_charts(runs))
    if charts:
        body += ["<h2>Over the steps</h2>", '<div class="sides curves">', *charts, "</div>"]
    body += _memory(runs)
    if len(runs) > 1 and (different := differences(runs)):
        body += ["<h2>What differs in their configs</h2>", _table("figures", runs, different)]
    body += _plans(runs)
    return document(title, body, _style())


def _style() -> str:
    def rules(colours: Sequence[str]) -> str:
        return "\n".join(
            f".run-{n} {{ fill: {c}; background: {c} }} .line.run-{n} {{ fill: none; stroke: {c} }}"
            for n, c in enumerate(colours)
        )

    return "\n".join([rules(_COLOURS), "@media (prefers-color-scheme: dark) {", rules(_DARK_COLOURS), "}", _RULES])


def _legend(runs: Sequence[Run]) -> str:
    return f'<p class="legend">{" ".join(_key(number, run.name) for number, run in enumerate(runs))}</p>'


def _key(number: int, words: str) -> str:
    return f'<span><span class="key run-{number}"></span>{escape(words)}</span>'


def _table(kind: str, runs: Sequence[Run], rows: Rows) -> str:
    heads = "".join(f"<th>{escape(run.name)}" for run in runs)
    lines = [f'<table class="{kind}"><tr><th>{heads}']
    lines += [f"<tr><td>{escape(name)}" + "".join(f"<td>{escape(cell)}" for cell in cells) for name, cells in rows]
    return "\n".join([*lines, "</table>"])


def _charts(runs: Sequence[Run]) -> Iterator[str]:
    """A chart for everything that was measured over the steps."""
    if len(runs) == 1:  # both losses in one chart, to compare them
        yield _chart(runs, ["loss", "val_loss"], "loss", _number)
    else:
        yield _chart(runs, ["loss"], "loss", _number)
        yield _chart(runs, ["val_loss"], "validation loss", _number)
    for name in scores(runs):
        if name != "val_loss":
            yield _chart(runs, [name], name, _number)
    yield _chart(runs, ["lr"], "learning rate", _number)
    yield _chart(runs, ["grad_norm"], "gradient norm", _number)
    speed = speed_of(runs)
    if speed is not None:
        title = f"{speed.removesuffix('_per_second')} a second"
        yield _chart(runs, [speed], title, _rounded_count, from_zero=True)
    yield _chart(runs, ["peak_memory_bytes"], "peak memory of rank 0", size_text, from_zero=True, in_bytes=True)
    for name in others(runs):
        yield _chart(runs, [name], name, _number)


def _chart(runs: Sequence[Run], names: Sequence[str], title: str, spell: Callable[[float], str], **scale: bool) -> str:
    """A chart of the metrics `names` of all runs; "" if no run has any of them. It names the runs without them."""
    lines = []
    for number, run in enumerate(runs):
        for place, name in enumerate(name for name in names if name in run.curves):
            colour = number if len(runs) > 1 else place
            words = run.name if len(runs) > 1 else name
            lines.append(Line(words, run.curves[name], colour, dotted=name.startswith("val_")))
    if not lines:
        return ""
    first = min(int(series.steps[0]) for run in runs for series in run.curves.values())
    last = max(run.last_step for run in runs)
    without = [run.name for run in runs if not any(name in run.curves for name in names)]
    caption = " ".join(_key(line.colour, line.name) for line in lines) if len(names) > 1 and len(lines) > 1 else ""
    if without:
        caption = f"not logged by {escape(', '.join(without))}"
    note = f' <span class="name">{caption}</span>' if caption else ""
    drawn = line_chart(lines, (first, last), f"{title} over steps {first:,} to {last:,}", spell, **scale)
    return f"<figure><figcaption>{escape(title)}{note}</figcaption>\n{drawn}</figure>"


def _memory(runs: Sequence[Run]) -> list[str]:
    """The memory of every rank of each run, with the estimate if there is one."""
    shown = [(number, run) for number, run in enumerate(runs) if run.peaks]
    if not shown:
        return []
    parts = ["<h2>Memory of every rank</h2>"]
    if any(_beside(run)[1] for _, run in shown):
        parts.append('<p class="legend"><span><span class="mark"></span>as it was predicted</span></p>')
    parts.append('<div class="sides curves">')
    for number, run in shown:
        of = f"{run.name}: " if len(runs) > 1 else ""
        measured, estimated = _beside(run)
        beyond = " beyond what it held before the model" * (measured != run.peaks)
        title = f"{of}each rank's peak{beyond}"
        drawn = rank_chart(measured, estimated, title, number)
        parts.append(f"<figure><figcaption>{escape(title)}</figcaption>\n{drawn}</figure>")
    return [*parts, "</div>"]


def _beside(run: Run) -> tuple[list[int], list[int]]:
    """The measured bytes of each rank, and those that were predicted of them; [] if they were not."""
    if len(run.predicted) == len(run.peaks):
        return run.peaks, run.predicted
    return (run.beyond_start, run.estimated) if is_compared(run) else (run.peaks, [])


def _plans(runs: Sequence[Run]) -> Iterator[str]:
    """The plans and meshes side by side. Runs with the same plan and mesh share one."""
    shared: dict[str, tuple[Run, list[str]]] = {}
    for run in runs:
        if run.plan is not None and run.session is not None:
            key = f"{run.session.world_size} {run.plan}"
            shared.setdefault(key, (run, []))[1].append(run.name)
    if len(shared) == 1:
        ((run, _),) = shared.values()
        yield from _plan(run, "h2")
    elif shared:
        yield '<div class="sides">'
        for run, names in shared.values():
            yield f"<div><h2>{escape(', '.join(names))}</h2>"
            yield from _plan(run, "h3")
            yield "</div>"
        yield "</div>"


def _plan(run: Run, heading: str) -> list[str]:
    assert run.plan is not None and run.session is not None
    return plan_section(run.plan, run.session.world_size, heading)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _rounded_count(value: float) -> str:
    return format_count(value).replace(".0", "")


@dataclass(frozen=True)
class Scale:
    """Maps values to heights in a chart.

    Args:
        low, high: the values at the bottom and the top, `low` below `high`.
        logarithmic: whether equal factors are equal heights; both ends are above 0 then.
        in_bytes: whether values are bytes. Then round values are those that are round in KiB, MiB and so on.
    """

    low: float
    high: float
    logarithmic: bool = False
    in_bytes: bool = False

    def y(self, value: float) -> float:
        """The y coordinate of `value`."""
        low, high, value = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return TOP + HIGH * (1 - (value - low) / (high - low))

    def ticks(self) -> list[float]:
        """Round values to write beside the scale."""
        if not self.logarithmic:
            unit = 1024 ** max(0, int(math.log(self.high, 1024))) if self.in_bytes and self.high > 0 else 1
            return [unit * value for value in round_values(self.low / unit, self.high / unit)]
        ends = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = max(1, (ends[1] - ends[0]) // _MOST_TICKS)
        powers = [10.0**power for power in range(ends[0], ends[1] + 1, every)]
        return [value for value in powers if self.low <= value <= self.high]


def scale_of(low: float, high: float, median: float, *, from_zero: bool = False, in_bytes: bool = False) -> Scale:
    """A scale for values from `low` to `high`. It is logarithmic if a few of them are far above all others.

    Args:
        median: the median of the values.
        from_zero: whether it begins at 0, so that heights can be compared.
        in_bytes: as for :class:`Scale`.
    """
    if low > 0 and high > 30 * median and not from_zero:
        return Scale(low / 1.2, high * 1.2, True)
    low = min(0.0, low) if from_zero else low
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return Scale(low if from_zero and low == 0 else low - room, high + room, in_bytes=in_bytes)


def round_values(low: float, high: float) -> list[float]:
    """A few round values between `low` and `high`."""
    least = (high - low) / _MOST_TICKS
    unit = 10.0 ** math.floor(math.log10(least))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def frame(scale: Scale, spell: Callable[[float], str]) -> list[str]:
    """Lines across a chart at round values, and the values, as SVG."""
    parts = []
    for value in scale.ticks():
        y = scale.y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDE}" class="grid"/>')
        words = _ZEROS.sub("", spell(value))
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{words}</text>')
    return parts


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
    ranks_per_bar = -(-len(measured) // _BARS)
    groups = [
        range(first, min(first + ranks_per_bar, len(measured))) for first in range(0, len(measured), ranks_per_bar)
    ]
    apart = WIDE / len(groups)
    wide = min(apart * 0.8, _WIDEST)
    every = next(every for every in (1, 2, 5, 10, 20, 50, 100) if len(groups) / every <= 16)
    for number, ranks in enumerate(groups):
        x = LEFT + (number + 0.5) * apart
        nbytes = max(measured[rank] for rank in ranks)
        y = scale.y(nbytes)
        words = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        tooltip = f"{words}: {size_text(nbytes)}"
        if estimated:
            tooltip += f", estimated {size_text(max(estimated[rank] for rank in ranks))}"
        parts.append(
            f'<rect x="{x - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{TOP + HIGH - y:.1f}" '
            f'class="bar run-{colour}"><title>{escape(tooltip)}</title></rect>'
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
    buckets = columns(series, count, first, last)
    width = WIDE / count
    middles = [LEFT + (float(place) + 0.5) * width for place in buckets.places]
    means = [(x, scale.y(float(mean))) for x, mean in zip(middles, buckets.means, strict=True)]
    return [
        f'<path d="{_outline(buckets, middles, scale)}z" class="spread run-{line.colour}"/>',
        f'<path d="{_path(means)}" class="line run-{line.colour}">{name}</path>',
    ]


def _outline(buckets: Columns, middles: Sequence[float], scale: Scale) -> str:
    """A path along the most of each column to the right, and back along the least."""
    above = [(x, scale.y(float(high))) for x, high in zip(middles, buckets.highs, strict=True)]
    below = [(x, scale.y(float(low))) for x, low in zip(middles, buckets.lows, strict=True)]
    return _path([*above, *below[::-1]])


def _path(points: Sequence[tuple[float, float]]) -> str:
    (x, y), *rest = points
    return f"M{x:.1f} {y:.1f}L" + " ".join(f"{x:.1f} {y:.1f}" for x, y in rest)


def _spoken(lines: Sequence[Line], span: tuple[int, int], spell: Callable[[float], str]) -> list[str]:
    """Invisible strips over the chart. Each shows the numbers below it as a tooltip."""
    first, last = span
    count = min(_STRIPS, last - first + 1)
    tooltips: list[list[str]] = [[] for _ in range(count)]
    for line in lines:
        buckets = columns(line.series, count, first, last)
        for place, low, mean, high in zip(buckets.places, buckets.lows, buckets.means, buckets.highs, strict=True):
            spread = (
                f" ({spell(float(low))} to {spell(float(high))})" if spell(float(low)) != spell(float(high)) else ""
            )
            tooltips[int(place)].append(f"{line.name}: {spell(float(mean))}{spread}")
    parts = []
    for number, words in enumerate(tooltips):
        if words:
            start = first - (-number * (last - first + 1) // count)
            end = first - (-(number + 1) * (last - first + 1) // count) - 1
            steps = f"step {start:,}" if start == end else f"steps {start:,} to {end:,}"
            x, wide = LEFT + WIDE * number / count, WIDE / count
            text = escape("\n".join([steps, *words]))
            shape = f'x="{x:.1f}" y="{TOP}" width="{wide:.1f}" height="{HIGH}"'
            parts.append(f'<rect {shape} class="strip"><title>{text}</title></rect>')
    return parts
