"""The page of one run or of several side by side: one HTML file that needs nothing else."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from tensorshard.common.quantities import format_count, size_text
from tensorshard.predict.page_frame import document, plan_section
from tensorshard.report.charts import Line, line_chart, rank_chart
from tensorshard.report.figures import Rows, differences, figures, is_compared, notes, others, scores, speed_of
from tensorshard.report.read_run import MOST_RUNS, Run

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
    said = " ".join(_key(line.colour, line.name) for line in lines) if len(names) > 1 and len(lines) > 1 else ""
    if without:
        said = f"not logged by {escape(', '.join(without))}"
    note = f' <span class="name">{said}</span>' if said else ""
    drawn = line_chart(lines, (first, last), f"{title} over steps {first:,} to {last:,}", spell, **scale)
    return f"<figure><figcaption>{escape(title)}{note}</figcaption>\n{drawn}</figure>"


def _memory(runs: Sequence[Run]) -> list[str]:
    """The memory of every rank of each run, with the estimate if there is one."""
    shown = [(number, run) for number, run in enumerate(runs) if run.peaks]
    if not shown:
        return []
    parts = ["<h2>Memory of every rank</h2>"]
    compared = any(is_compared(run) for _, run in shown)
    if compared:
        parts.append(
            '<p class="legend"><span><span class="mark"></span>as it was estimated, in live tensors</span></p>'
        )
    parts.append('<div class="sides curves">')
    for number, run in shown:
        of = f"{run.name}: " if len(runs) > 1 else ""
        measured, estimated = (run.beyond_start, run.estimated) if is_compared(run) else (run.peaks, [])
        what = "peak beyond what it held before the model" if is_compared(run) else "peak"
        title = f"{of}each rank's {what}"
        drawn = rank_chart(measured, estimated, title, number)
        parts.append(f"<figure><figcaption>{escape(title)}</figcaption>\n{drawn}</figure>")
    return [*parts, "</div>"]


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
