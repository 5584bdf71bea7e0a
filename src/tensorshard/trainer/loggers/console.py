"""Training as a person watches it: a progress bar on a terminal, sparse lines elsewhere."""

import logging
import time
from collections.abc import Callable, Mapping

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tensorshard.common.words import fit, format_count, size_text, speed_words
from tensorshard.trainer.loggers.files import Logger

AS_IT_IS = {"as_it_is": True}
"""The ``extra`` of a log record whose lines must not be broken, such as a command to copy."""

_GAP = "  "
_LEAST_BAR = 10
_WORK = "flops_per_second"


def console_logger(console: Console) -> Logger:
    """The progress bar if `console` is a terminal that can move its cursor, else plain lines."""
    moves = console.is_terminal and not console.is_dumb_terminal
    return ProgressBarLogger(console) if moves else PlainLogger(console)


def print_lines(console: Console, text: str, style: str | None = None) -> None:
    """Prints `text`, its lines broken at words to the width of a terminal; files get them as they are."""
    width = console.width if console.is_terminal else None
    console.print(fit(text, width), style=style, soft_wrap=True, highlight=False, markup=False)


class ProgressBarLogger(Logger):
    """A bar with the loss, the speed, the time left and the peak memory. Evaluations stay above it as lines.

    A narrow terminal loses the bar first, then the operations a second, then the memory.

    Args:
        console: a terminal; what else is printed there while the bar is shown must go through it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(_TrainingLine(console), console=console, expand=True)

    def start(self, step: int, max_steps: int) -> None:
        self._max_steps = max_steps
        self._task = self._progress.add_task("train", total=max_steps, completed=step, metrics={})
        self._progress.start()

    def step_done(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        bar = {name: value for name, value in metrics.items() if not name.startswith("val_")}
        self._progress.update(self._task, metrics=bar)
        if len(bar) < len(metrics):
            print_lines(self._console, f"step {step}/{self._max_steps}{_GAP}{format_figures(metrics)}")

    def close(self) -> None:
        self._progress.stop()


class _TrainingLine(ProgressColumn):
    """The progress line, which is drawn anew at each step."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def render(self, task: Task) -> RenderableType:
        total = int(task.total or 0)
        metrics = task.fields["metrics"]
        figures = {name: value for name, value in metrics.items() if name not in ("peak_memory_bytes", _WORK)}
        left = "-:--" if task.time_remaining is None else format_seconds(task.time_remaining)
        step = f"{int(task.completed):>{len(str(total))}}/{total}"
        parts = [f"step {step}", *_figures(figures), f"eta {left}"]
        width = self._console.width
        if len(_GAP.join(parts)) > width:
            parts = [step, *(part.replace(" tokens/s", " tok/s") for part in parts[1:])]
        more = [size_text(metrics["peak_memory_bytes"])] if "peak_memory_bytes" in metrics else []
        more += [work_words(metrics)] if _WORK in metrics else []
        for words in more:
            longer = [*parts[:-1], words, parts[-1]]
            parts = longer if len(_GAP.join(longer)) <= width else parts
        room = width - len(_GAP.join(parts)) - len(_GAP)
        if room < _LEAST_BAR:
            return Text(_GAP.join(parts), no_wrap=True)
        line = Table.grid(padding=(0, len(_GAP), 0, 0))
        bar = ProgressBar(total=task.total, completed=task.completed, width=room)
        line.add_row(Text(parts[0], no_wrap=True), bar, Text(_GAP.join(parts[1:]), no_wrap=True))
        return line


class PlainLogger(Logger):
    """A line for the first step, the last one and every evaluation; between them at most one every few seconds.

    Args:
        console: where to print.
        seconds: between ordinary lines.
        clock: seconds of some monotonic clock.
    """

    def __init__(self, console: Console, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._seconds = seconds
        self._clock = clock
        self._printed_at = -float("inf")

    def start(self, step: int, max_steps: int) -> None:
        self._first_step, self._max_steps = step, max_steps
        self._started = self._clock()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        evaluated = any(name.startswith("val_") for name in metrics)
        if now - self._printed_at < self._seconds and not evaluated and step != self._max_steps:
            return
        self._printed_at = now
        left = (now - self._started) / (step - self._first_step) * (self._max_steps - step)
        eta = f"  eta {format_seconds(left)}" if step < self._max_steps else ""
        width = len(str(self._max_steps))
        self._console.print(
            f"step {step:>{width}}/{self._max_steps}  {format_figures(metrics)}{eta}",
            highlight=False,
            soft_wrap=True,
        )


class ConsoleHandler(logging.Handler):
    """Prints log records above the progress bar, if there is one."""

    def __init__(self, console: Console, level: int = logging.INFO) -> None:
        super().__init__(level)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else None
        if getattr(record, "as_it_is", False):
            self._console.print(self.format(record), style=style, soft_wrap=True, highlight=False, markup=False)
        else:
            print_lines(self._console, self.format(record), style)


def format_figures(metrics: Mapping[str, float]) -> str:
    """The measurements for a person: losses and scores, speed, peak memory. The others are only in the files."""
    return _GAP.join(_figures(metrics))


def _figures(metrics: Mapping[str, float]) -> list[str]:
    parts = [f"{name} {value:.4f}" for name, value in metrics.items() if name == "loss" or name.startswith("val_")]
    if "tokens_per_second" in metrics:
        parts.append(f"{format_count(metrics['tokens_per_second'])} tokens/s")
    elif "samples_per_second" in metrics:
        parts.append(f"{format_count(metrics['samples_per_second'])} samples/s")
    if _WORK in metrics:
        parts.append(work_words(metrics))
    if "peak_memory_bytes" in metrics:
        parts.append(size_text(metrics["peak_memory_bytes"]))
    return parts


def work_words(metrics: Mapping[str, float]) -> str:
    """``flops_per_second``, with the ``mfu`` if it is known, as text."""
    return speed_words(metrics[_WORK], metrics.get("mfu"))


def format_seconds(seconds: float) -> str:
    """Hours, minutes and seconds: ``format_seconds(75)`` is "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
