"""The memory estimate that ``tensorshard train`` prints before it starts anything, and whether the run can fit."""

from collections.abc import Iterator

from omegaconf import DictConfig

from tensorshard.comm.forked import TriedInVain, in_forked_process
from tensorshard.common.quantities import size_text
from tensorshard.config import ConfigError
from tensorshard.host.memory import available_on_host
from tensorshard.predict import Estimate
from tensorshard.predict.describe import stage_lines
from tensorshard.trainer.estimated_run import estimate_run
from tensorshard.trainer.gpu_memory import memory_of_gpus

PATIENCE = 60.0
"""Seconds that an estimate may take before training starts without one."""

_SHOWN = 3


def estimate_first(
    config: DictConfig, world_size: int, ranks_here: int, *, gpus: bool, force: bool
) -> tuple[Estimate | None, list[str]]:
    """Estimates the run of `config` in a process of its own.

    Args:
        ranks_here: how many of the ranks run on this machine.
        gpus: whether each of them has a GPU.
        force: whether to go on if the run cannot fit.

    Returns:
        The estimate, None if it could not be made; and lines to print.

    Raises:
        ConfigError: the live tensors alone are more than this machine has memory for.
    """
    try:
        found = in_forked_process(lambda: estimate_run(config, world_size, device="cuda" if gpus else "cpu"), PATIENCE)
    except TriedInVain as error:
        return None, [f"no estimate of memory, training goes on: {error}"]
    lines = _said_of(found)
    there = memory_of_gpus() if gpus else available_on_host()
    peaks = found.peaks
    if there is not None:
        needed = max(peaks) if gpus else max(sum(peaks[i : i + ranks_here]) for i in range(0, world_size, ranks_here))
        of = f"{size_text(needed)} of live tensors on " + ("one GPU" if gpus else f"this machine's {ranks_here} ranks")
        has = f"{size_text(there)} " + ("of its memory" if gpus else "of memory that is available")
        if needed > there and not force:
            raise ConfigError(
                f"this run cannot fit: it is estimated to hold {of}, of {has}; `tensorshard estimate` with "
                f"--world-size {world_size} --memory {_per_rank(there, ranks_here, gpus)} says what would fit, and "
                f"--force starts the run all the same"
            )
        lines.append(f"{'does not fit' if needed > there else 'fits'}: {of}, of {has}")
    return found, lines


def _per_rank(there: int, ranks_here: int, gpus: bool) -> str:
    return f"{(there if gpus else there // ranks_here) >> 20}MiB"


def _said_of(found: Estimate) -> list[str]:
    if len(found.ranks) > 1:
        return stage_lines(found.ranks)
    return [f"peak           {size_text(found.largest.peak_allocated)} of live tensors a rank, in "
            f"{found.largest.phase}", f"mostly         {'  '.join(_most(found))}"]  # fmt: skip


def _most(found: Estimate) -> Iterator[str]:
    held = sorted(found.largest.by_category.items(), key=lambda item: -item[1])
    for name, nbytes in held[:_SHOWN]:
        yield f"{name} {size_text(nbytes)}"
