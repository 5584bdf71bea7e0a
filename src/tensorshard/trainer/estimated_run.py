"""The memory of a run, from its config, before it is started."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from tensorshard.comm.forked import ForkFailed, in_forked_process
from tensorshard.common.progress import end_words
from tensorshard.common.words import flops_words, size_text
from tensorshard.config import ConfigError
from tensorshard.host.memory import available_on_host
from tensorshard.parallelize.part import Decisions
from tensorshard.plan.plan import Plan
from tensorshard.predict import Estimate, estimate
from tensorshard.predict.changes import Change, find_changes
from tensorshard.predict.describe import stage_lines
from tensorshard.predict.hardware import Hardware
from tensorshard.tensor_parallel.table.table import VerifiedTable
from tensorshard.trainer.initial_model import RunParts
from tensorshard.trainer.memory import hardware_of_run, memory_of_gpus


class EstimatedRun:
    """Estimates of one config's run, under its plan and under others. The global batch is the same in all.

    Args:
        config: what :func:`tensorshard.config.load_config` returned.
        world_size: the number of ranks.
        hardware, device: as for :func:`tensorshard.predict.estimate`.

    Raises:
        ConfigError: the config cannot be run on so many ranks.
    """

    def __init__(
        self, config: DictConfig, world_size: int, hardware: str | Hardware | None = None, *, device: str | None = None
    ) -> None:
        self._parts = RunParts(config)
        self._world_size = world_size
        self._hardware = hardware
        self._device = device
        self._settings = self._parts.settings
        self._settings.check_batch(self._settings.plan.resolve(world_size).dp_size)
        self._sample = self._parts.sample()
        # Results of one estimate that later ones use: tensor-parallel tables by degree, and the run of the constructor.
        self._tables: dict[tuple[int, bool], VerifiedTable | None] = {}
        self._shared = Decisions()

    def estimate(self, plan: Plan | None = None) -> Estimate:
        """The memory that the run takes; see :func:`tensorshard.predict.estimate`.

        Args:
            plan: in place of the one that the config has.

        Raises:
            ConfigError, ValueError: the plan does not suit the batch, the number of ranks or the model.
        """
        settings = self._settings if plan is None else replace(self._settings, plan=plan)
        resolved = settings.plan.resolve(self._world_size)
        settings.check_batch(resolved.dp_size)
        inputs, targets = self._batch(settings.global_batch_size // resolved.dp_size)
        split = (resolved.tp, resolved.sequence_parallel)
        decisions = Decisions(table=self._tables.get(split), recorded=self._shared.recorded)
        estimated = estimate(
            plan=resolved,
            world_size=self._world_size,
            inputs=inputs,
            targets=targets,
            **self._parts.arguments(),
            hardware=self._hardware,
            device=self._device,
            decisions=decisions,
        )
        self._tables[split], self._shared.recorded = decisions.table, decisions.recorded
        return estimated

    def changes_that_fit(self, estimate: Estimate, memory: int) -> tuple[list[Change], str]:
        """The cheapest changes of the plan of `estimate` with which the run fits into `memory` bytes of each device.

        Also why the search for them ended early; "" if it did not.
        """
        batch = self._settings.global_batch_size // estimate.plan.dp_size

        def needed(plan: Plan) -> int:
            return (estimate if plan == estimate.plan else self.estimate(plan)).largest.peak_device

        changes: list[Change] = []
        try:
            for change in find_changes(estimate.plan, memory, needed, batch=batch):
                changes.append(change)
        except KeyboardInterrupt as stop:
            return changes, end_words(stop)
        return changes, ""

    def _batch(self, samples: int) -> Any:
        """A batch of the first sample, again and again: only its shapes matter."""
        return self._parts.collate([self._sample] * samples)


def estimate_run(config: DictConfig, world_size: int, *, device: str) -> Estimate:
    """The estimate of the run of `config` on `world_size` ranks. Arguments and errors as for :class:`EstimatedRun`.

    Its times are those of this machine, see :func:`tensorshard.trainer.memory.hardware_of_run`.
    """
    hardware = hardware_of_run(gpus=device == "cuda")
    return EstimatedRun(config, world_size, hardware, device=device).estimate()


PATIENCE = 60.0
"""Seconds that an estimate may take before a run starts without one."""

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
        estimate = in_forked_process(
            lambda: estimate_run(config, world_size, device="cuda" if gpus else "cpu"), PATIENCE
        )
    except ForkFailed as error:
        return None, [f"no estimate of memory: {error}"]
    lines = [*_peak_lines(estimate), *_time_lines(estimate)]
    available = memory_of_gpus() if gpus else available_on_host()
    peaks = estimate.peaks
    if available is not None:
        needed = max(peaks) if gpus else max(sum(peaks[i : i + ranks_here]) for i in range(0, world_size, ranks_here))
        of = f"{size_text(needed)} of live tensors on " + ("one GPU" if gpus else f"this machine's {ranks_here} ranks")
        has = f"{size_text(available)} " + ("of its memory" if gpus else "of memory that is available")
        if needed > available and not force:
            raise ConfigError(
                f"this run cannot fit: it is estimated to hold {of}, of {has}; `tensorshard estimate` with "
                f"--world-size {world_size} --memory {_per_rank(available, ranks_here, gpus)} says what would fit, and "
                f"--force starts the run all the same"
            )
        lines.append(f"{'does not fit' if needed > available else 'fits'}: {of}, of {has}")
    return estimate, lines


def _per_rank(there: int, ranks_here: int, gpus: bool) -> str:
    return f"{(there if gpus else there // ranks_here) >> 20}MiB"


def _peak_lines(estimate: Estimate) -> list[str]:
    if len(estimate.ranks) > 1:
        return stage_lines(estimate.ranks)
    return [f"peak           {size_text(estimate.largest.peak_allocated)} of live tensors a rank, in "
            f"{estimate.largest.phase}", f"mostly         {'  '.join(_most(estimate))}"]  # fmt: skip


def _time_lines(estimate: Estimate) -> list[str]:
    if estimate.hardware is None or estimate.step_time is None:
        return []
    work = f"{flops_words(estimate.model_flops)} on all ranks"
    return [f"a step         {estimate.time_words()}, {estimate.hardware.basis}", f"its work       {work}"]


def _most(estimate: Estimate) -> Iterator[str]:
    sizes = sorted(estimate.largest.by_category.items(), key=lambda item: -item[1])
    for name, nbytes in sizes[:_SHOWN]:
        yield f"{name} {size_text(nbytes)}"
