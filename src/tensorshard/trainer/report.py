"""What a run prints before and after training."""

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from tensorshard.common.words import format_count, size_text
from tensorshard.config.files import ASKED, modules_to_allow
from tensorshard.engine.engine import Engine
from tensorshard.predict import Estimate
from tensorshard.trainer.loggers.console import print_lines, work_words
from tensorshard.trainer.memory import COMPARED_MEMORY
from tensorshard.trainer.run_directory import RunDirectory

logger = logging.getLogger("tensorshard")

_RANKS_SHOWN = 8


def print_opening(console: Console, engine: Engine, held_parameters: Sequence[int], *, verbose: bool = False) -> None:
    """Prints the plan, and the types and sizes of what each rank holds, before training; the whole goes to the log.

    Args:
        console: where to print.
        engine: of rank 0.
        held_parameters: number of parameters on each rank.
        verbose: whether to print the whole: each field of the plan, and the mesh with the axes of degree 1.
    """
    by_rank = f"held by rank   {_by_rank(held_parameters, '{:,}'.format)}"
    sections = {
        "plan": engine.plan.describe(),
        "mesh": engine.mesh.describe(),
        "model": f"{engine.summary().describe()}\n{by_rank}",
    }
    if verbose:
        for title, text in sections.items():
            console.rule(title, align="left", characters="-")
            print_lines(console, text)
        return
    logger.debug("%s", "\n".join(f"{title}\n{text}" for title, text in sections.items()))
    print_lines(console, f"plan           {engine.plan.in_short()}\n{engine.summary().describe(short=True)}\n{by_rank}")


def print_summary(
    console: Console,
    *,
    steps: int,
    figures: Mapping[str, float],
    peak_bytes: Sequence[int],
    above_start: Sequence[int],
    expected: Estimate | None,
    directory: RunDirectory,
) -> None:
    """Prints the results of a run.

    Args:
        console: where to print.
        steps: optimizer steps done in all.
        figures: measurements by name: the last loss and evaluation, mean speeds.
        peak_bytes: each rank's peak memory.
        above_start: the same without what the rank held before the model was made: on a CPU, the interpreter and
            libraries.
        expected: the run's estimate, which stands beside what was measured; None without one.
        directory: of the run.
    """
    table = Table(show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    table.add_row("steps", str(steps))
    for name, value in figures.items():
        if name == "loss" or name.startswith("val_"):
            table.add_row(name, f"{value:.4f}")
    speeds = [name for name in ("tokens_per_second", "samples_per_second") if name in figures]
    if speeds:
        words = [f"{format_count(figures[name])} {name.removesuffix('_per_second')}/s" for name in speeds]
        words += [work_words(figures)] if "flops_per_second" in figures else []
        table.add_row("speed", ", ".join(words))
        table.add_row("a step", f"{figures['step_seconds']:.3f} s")
        if expected is not None and expected.hardware is not None and expected.step_time is not None:
            table.add_row("predicted", f"{expected.time_words()}, {expected.hardware.basis}")
    table.add_row("peak memory", _by_rank(peak_bytes, size_text))
    if expected is not None:
        held = [peak - above for peak, above in zip(peak_bytes, above_start, strict=True)]
        table.add_row("predicted", _by_rank(predicted_peaks(expected, held), size_text))
        if max(expected.peaks) >= COMPARED_MEMORY:
            table.add_row("beyond start", _by_rank(above_start, size_text))
            table.add_row("estimated", f"{_by_rank(expected.peaks, size_text)} of live tensors")
    console.rule("summary", align="left", characters="-")
    console.print(table)
    for name, place in places(directory).items():
        # Printed below the table, which would break long paths.
        console.print(f"{name:<12} {place}", soft_wrap=True, highlight=False, markup=False)


def places(directory: RunDirectory) -> dict[str, Path | str]:
    """What a run has written, and where."""
    found: dict[str, Path | str | None] = {
        "checkpoint": directory.newest_checkpoint(),
        "metrics": directory.metrics,
        "config": directory.config,
        "tensorboard": directory.tensorboard if directory.tensorboard.is_dir() else None,
        "profile": directory.profile if directory.profile.is_dir() else None,
        "logs": directory.path / "rank*.log",
    }
    return {name: place for name, place in found.items() if place is not None}


def predicted_peaks(expected: Estimate, held_before: Sequence[int]) -> list[int]:
    """Each rank's peak memory in bytes, as its process measures it: what it held before the model was made, the live
    tensors of the estimate and, on CPU ranks, what such a process takes beside them."""
    return [held + rank.peak_measured for held, rank in zip(held_before, expected.of_each_rank, strict=True)]


def resume_command(config: DictConfig, directory: RunDirectory) -> str:
    """The command line that continues a run in `directory`, quoted for a shell.

    It has the config, the overrides and the options with which the run was started. If the config was made in Python,
    it has the run's ``config.yaml`` instead.
    """
    # --resume comes last: it would read a word after it as a checkpoint.
    return f"{again_command(config, directory)} {shlex.join(['--output', str(directory.path), '--resume'])}"


def again_command(config: DictConfig, directory: RunDirectory) -> str:
    """The command line that begins the run in `directory` anew, in another directory. See :func:`resume_command`."""
    if ASKED in config:
        asked = config[ASKED]
        words = [asked.config, *asked.overrides, *asked.get("options", [])]
    else:
        words = [directory.config]
        for module in modules_to_allow(config):
            words += ["--allow", module]
    return shlex.join(["tensorshard", "train", *map(str, words)])


def _by_rank(sizes: Sequence[int], spell: Callable[[int], str]) -> str:
    """The size of each rank if there are few, else the smallest and the largest."""
    if len(sizes) <= _RANKS_SHOWN:
        return "  ".join(f"rank {rank}: {spell(size)}" for rank, size in enumerate(sizes))
    largest = max(sizes)
    return f"{spell(min(sizes))} to {spell(largest)} on {len(sizes)} ranks, most on rank {sizes.index(largest)}"
