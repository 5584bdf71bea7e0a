"""The words and numbers for each run, the same in a terminal and on a page."""

from collections.abc import Iterator, Sequence
from typing import Any

from tensorshard.common.words import flat_items, format_count, seconds_words, size_text, span_words, speed_words
from tensorshard.report.read_run import Run, Series

Rows = list[tuple[str, list[str]]]
"""The name of each row, and its cell for each run."""

ABSENT = "-"

_SMALL = 256 << 20  # bytes of live tensors, on a CPU; below, libraries and connections are most of what is measured

_SPEEDS = ("tokens_per_second", "samples_per_second")
_NOT_COMPARED = ("train.name", "train.output_dir")
_OTHER = (
    "step_seconds",
    "samples",
    "peak_memory_bytes",
    "flops_per_second",
    "mfu",
)  # curves of these would say nothing more


def figures(runs: Sequence[Run]) -> Rows:
    """The figures of each run, as rows. A row is left out if no run has it."""
    of_runs = [dict(_figures(run)) for run in runs]
    names = list(dict.fromkeys(name for of_run in of_runs for name in of_run))
    return [(name, [of_run.get(name, ABSENT) for of_run in of_runs]) for name in names]


def differences(runs: Sequence[Run]) -> Rows:
    """The settings that are not the same in all runs, by their keys in the config."""
    flat = [dict(flat_items(run.config)) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config if key not in _NOT_COMPARED)
    rows = [(key, [config.get(key, ABSENT) for config in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def notes(runs: Sequence[Run]) -> list[str]:
    """Sentences that a reader of the figures needs to know."""
    sentences = []
    for run in runs:
        of = f"{run.name}: " if len(runs) > 1 else ""
        if not run.metrics:
            sentences.append(f"{of}no step is logged yet; every {_log_every(run)} steps a line is.")
        if run.unread:
            sentences.append(f"{of}{_count(run.unread, 'line')} of metrics.jsonl could not be read, and were left out.")
        for name, series in run.curves.items():
            if series.dropped:
                sentences.append(f"{of}{_count(series.dropped, 'value')} of {name} not finite, and not drawn.")
        if run.estimated and not run.predicted and not is_compared(run) and run.peaks and max(run.estimated) < _SMALL:
            sentences.append(
                f"{of}the estimate is of live tensors; of processes this small, libraries and connections hold most of "
                f"what was measured."
            )
        for session in run.sessions[1:]:
            ranks = _count(session.world_size, "rank")
            sentences.append(f"{of}resumed at step {session.first_step}, on {ranks}.")
    return sentences


def speed_of(runs: Sequence[Run]) -> str | None:
    """The measure of speed that most of the runs have: "tokens_per_second" before "samples_per_second"."""
    there = [name for name in _SPEEDS if any(name in run.metrics for run in runs)]
    return max(there, key=lambda name: sum(name in run.metrics for run in runs), default=None)


def scores(runs: Sequence[Run]) -> list[str]:
    """The names of what was measured on validation data, the loss first."""
    names = dict.fromkeys(name for run in runs for name in run.curves if name.startswith("val_"))
    return sorted(names, key=lambda name: name != "val_loss")


def others(runs: Sequence[Run]) -> list[str]:
    """The names of what was logged beyond what every run logs."""
    known = {"loss", "lr", "grad_norm", *_SPEEDS, *_OTHER, *scores(runs)}
    return list(dict.fromkeys(name for run in runs for name in run.curves if name not in known))


def by_rank(sizes: Sequence[int]) -> str:
    """Bytes of each rank, in short: the smallest and the largest."""
    low, high = size_text(min(sizes)), size_text(max(sizes))
    return low if low == high else f"{low} to {high} (rank {sizes.index(max(sizes))})"


def is_compared(run: Run) -> bool:
    """Whether every rank's memory was both measured and estimated, and is large enough for a comparison to say
    anything."""
    known = 0 < len(run.peaks) == len(run.beyond_start) == len(run.estimated)
    return known and (run.session is None or run.session.device != "cpu" or max(run.estimated) >= _SMALL)


def ratio(run: Run) -> str:
    """The fullest rank's measured memory divided by the estimate; "" if they are not compared."""
    return f"{max(run.beyond_start) / max(run.estimated):.2f}" if is_compared(run) else ""


def _figures(run: Run) -> Iterator[tuple[str, str]]:
    yield "steps", _steps(run)
    session, metrics = run.session, run.metrics
    if session is not None:
        yield "ranks", f"{session.world_size} x {session.device}"
    if run.plan is not None:
        yield "plan", run.plan.in_short()
    if "loss" in metrics:
        yield "loss", _from_to(metrics["loss"])
    for name in scores([run]):
        yield name, _score(name, metrics[name])
    if "lr" in metrics:
        yield "learning rate", f"{metrics['lr'].last:.3g}"
    if "grad_norm" in metrics:
        step, value = metrics["grad_norm"].highest()
        yield "gradient norm", f"{metrics['grad_norm'].median:.3g}, at most {value:.3g} (step {step:,})"
    speed = speed_of([run])
    if speed is not None:
        yield "speed", f"{format_count(metrics[speed].median)} {speed.removesuffix('_per_second')}/s"
    if "flops_per_second" in metrics:
        mfu = metrics["mfu"].median if "mfu" in metrics else None
        yield "operations", speed_words(metrics["flops_per_second"].median, mfu)
    if "step_seconds" in metrics:
        yield "time of a step", seconds_words(metrics["step_seconds"].median)
    if session is not None and session.estimated_step_seconds is not None:
        worth = f", {session.times_are}" if session.times_are else ""
        yield "as estimated", span_words(session.estimated_step_seconds, session.estimated_step_span) + worth
    if run.peaks:
        yield "peak memory", by_rank(run.peaks)
    if run.predicted:
        yield "predicted memory", by_rank(run.predicted)
    if is_compared(run) and run.beyond_start != run.peaks:
        yield "beyond start", by_rank(run.beyond_start)
    if run.estimated and (is_compared(run) or not run.predicted):
        yield "estimated memory", by_rank(run.estimated)
    if ratio(run):
        yield "measured / estimated", ratio(run)


def _steps(run: Run) -> str:
    done, steps = run.last_step, run.steps
    text = f"{done:,}" if steps is None else f"{done:,} of {steps:,}"
    is_open = steps is None or done < steps
    return f"{text}, last written {_ago(run.idle_seconds)}" if is_open and run.idle_seconds is not None else text


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}s ago"
    return f"{seconds:.0f} s ago"


def _from_to(series: Series) -> str:
    return f"{series.last:.4f}" if len(series) == 1 else f"{series.first:.4f} to {series.last:.4f}"


def _score(name: str, series: Series) -> str:
    text = f"{series.last:.4f}"
    step, value = series.lowest()
    if name != "val_loss" or value == series.last:  # for other scores the highest value may be the best
        return text
    return f"{text}, lowest {value:.4f} (step {step:,})"


def _log_every(run: Run) -> Any:
    train = run.config.get("train")
    return train.get("log_every", "few") if isinstance(train, dict) else "few"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
