"""What a run says before and after training, to whoever started it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from tensorshard.engine import Engine
from tensorshard.trainer.loggers.console import format_count, format_seconds
from tensorshard.trainer.memory import format_bytes
from tensorshard.trainer.run_directory import RunDirectory

_RANKS_SHOWN = 8


def print_opening(console: Console, engine: Engine) -> None:
    """The plan, the mesh, and what is held where in which type. Nothing is trained yet when this is read."""
    sections = {
        "plan": engine.plan.describe(),
        "mesh": engine.mesh.describe(),
        "model": engine.summary().describe(),
    }
    for title, text in sections.items():
        console.print(Panel(text, title=title, title_align="left", highlight=False), markup=False)


def print_summary(
    console: Console,
    *,
    steps: int,
    seconds: float,
    figures: Mapping[str, float],
    peak_bytes: Sequence[int],
    directory: RunDirectory,
) -> None:
    """What came of a run.

    Args:
        console: where to print.
        steps: optimizer steps done in all.
        seconds: that this process trained, evaluations and checkpoints included.
        figures: measurements by name: the last loss and evaluation, mean speeds.
        peak_bytes: each rank's peak memory.
        directory: of the run.
    """
    table = Table(title="summary", title_justify="left", show_header=False, title_style="bold")
    table.add_row("steps", f"{steps}, in {format_seconds(seconds)}")
    for name, value in figures.items():
        if name == "loss" or name.startswith("val_"):
            table.add_row(name, f"{value:.4f}")
    for unit in ("tokens", "samples"):
        if f"{unit}_per_second" in figures:
            table.add_row("speed", f"{format_count(figures[f'{unit}_per_second'])} {unit}/s")
    if "step_seconds" in figures:
        table.add_row("step time", f"{figures['step_seconds']:.3f} s")
    table.add_row("peak memory", _format_peaks(peak_bytes))
    table.add_row("checkpoint", str(directory.newest_checkpoint() or "none"))
    table.add_row("metrics", str(directory.metrics))
    table.add_row("config", str(directory.config))
    console.print(table, soft_wrap=True)


def resume_command(config: Path) -> str:
    """The command line that continues the run of this ``config.yaml``."""
    return f"tensorshard train {shlex.quote(str(config))} --resume"


def _format_peaks(peak_bytes: Sequence[int]) -> str:
    if len(peak_bytes) <= _RANKS_SHOWN:
        return "  ".join(f"rank {rank}: {format_bytes(peak)}" for rank, peak in enumerate(peak_bytes))
    highest = max(peak_bytes)
    return (
        f"{format_bytes(min(peak_bytes))} to {format_bytes(highest)} on {len(peak_bytes)} ranks, "
        f"most on rank {peak_bytes.index(highest)}"
    )
