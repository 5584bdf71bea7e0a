"""Profiles of steps, and what was held when memory ran out."""

import logging
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from tensorshard.comm.sharding import to_local
from tensorshard.common.words import size_text
from tensorshard.engine.engine import Engine
from tensorshard.predict.changes import milder
from tensorshard.predict.estimate import Estimate
from tensorshard.predict.profile_memory import MemoryProfile, profile_memory
from tensorshard.torch_private.process import recorded_cuda_memory, silence_profiler_marks
from tensorshard.trainer.trainer import Hook, StepRecord

if TYPE_CHECKING:
    from tensorshard.trainer.trainer import Trainer

STEPS = 2
"""How many are recorded: the first makes the optimizer's states, the second has them all the time."""
_LINES = 5


class MemoryProfileHook(Hook):
    """Records what the first steps of this run hold on each rank, and writes it to ``memory.html``.

    On GPUs each rank also writes ``memory-rank<r>.pickle``, CUDA's own snapshot, for https://pytorch.org/memory_viz.
    Steps are slower while they are recorded.

    Args:
        directory: for these files.
        estimate: to be shown beside what is measured, if there is one.
    """

    def __init__(self, directory: Path, estimate: Estimate | None = None) -> None:
        self.directory = directory
        self.estimate = estimate
        self._recording: ExitStack | None = None
        self._profile: MemoryProfile | None = None
        self._left = STEPS

    def before_step(self, trainer: "Trainer") -> None:
        if self._recording is None and self._left:
            self.directory.mkdir(parents=True, exist_ok=True)
            engine = trainer.engine
            self._recording = ExitStack()
            snapshot = self.directory / f"memory-rank{engine.mesh.rank}.pickle"
            self._recording.enter_context(recorded_cuda_memory(engine.device, snapshot))
            self._profile = self._recording.enter_context(profile_memory(engine))

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._write(trainer)

    def after_train(self, trainer: "Trainer") -> None:
        if self._recording is not None:  # fewer steps were left
            self._left = 0
            self._write(trainer)

    def close(self) -> None:
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def _write(self, trainer: "Trainer") -> None:
        """Collective: the fullest rank of each stage is shown."""
        self.close()
        assert self._profile is not None
        profiles: list[MemoryProfile] = [self._profile] * trainer.engine.mesh.world_size
        dist.all_gather_object(profiles, self._profile)
        if trainer.engine.mesh.rank == 0:
            page = self.directory / "memory.html"
            profiles[0].joined(profiles[1:]).to_html(page, self.estimate)
            logger.info("memory of the first steps: %s", page)


logger = logging.getLogger("tensorshard")

_OPERATORS_SHOWN = 8
_SPAN = re.compile(r"(\d+)-(\d+)")


class ProfileHook(Hook):
    """Writes a trace of `steps` on each rank, and prints the operators on which rank 0 spent the most time.

    Each trace is a Chrome trace, ``rank<r>-steps-<first>-<last>.json``, for https://ui.perfetto.dev or
    ``chrome://tracing``. Times include what the profiler costs. Put it after the hook that times steps.

    Args:
        steps: as :func:`profiled_steps` gives them.
        directory: for the traces.
        console: where to print; rank 0's.
    """

    def __init__(self, steps: range, directory: Path, console: Console) -> None:
        self.steps = steps
        self.directory = directory
        self._console = console
        self._profiler: profile | None = None
        self._step: record_function | None = None

    def before_train(self, trainer: "Trainer") -> None:
        if trainer.step >= self.steps[-1]:
            logger.info(
                "train.profile names steps that were taken before step %d; nothing is profiled", trainer.step + 1
            )

    def before_step(self, trainer: "Trainer") -> None:
        number = trainer.step + 1
        if number not in self.steps:
            return
        if self._profiler is None:
            self._first = number
            activities = [ProfilerActivity.CPU]
            if trainer.engine.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            else:
                silence_profiler_marks()
            self._profiler = profile(activities=activities, acc_events=True)  # without it torch warns of cycles
            self._profiler.start()
        self._step = record_function(f"step {number}")
        self._step.__enter__()

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        if self._step is None:
            return
        if trainer.engine.device.type == "cuda":
            torch.cuda.synchronize(trainer.engine.device)  # kernels that were launched belong to this step
        self._end_step()
        if record.step == self.steps[-1]:
            self._write(trainer)

    def after_train(self, trainer: "Trainer") -> None:
        if self._profiler is not None:  # training was stopped early
            self._write(trainer)

    def close(self) -> None:
        self._end_step()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _write(self, trainer: "Trainer") -> None:
        assert self._profiler is not None
        done, self._profiler = self._profiler, None
        done.stop()
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self.directory / f"rank{trainer.engine.mesh.rank}-steps-{self._first}-{trainer.step}.json"
        done.export_chrome_trace(str(file))
        logger.info("profile of steps %d to %d: %s", self._first, trainer.step, file)
        if trainer.engine.mesh.rank == 0:
            self._console.print(_largest_operators(done, trainer.engine.device.type))


def profiled_steps(value: Any) -> range:
    """The steps that ``train.profile`` names: ``10``, ``"10-12"`` or ``{"first": 10, "steps": 3}``.

    Raises:
        ValueError: `value` has none of these forms.
    """
    steps = range(0)
    if _is_number(value):
        steps = range(value, value + 1)
    elif isinstance(value, str) and (match := _SPAN.fullmatch(value.strip())):
        steps = range(int(match[1]), int(match[2]) + 1)
    elif isinstance(value, dict) and value.keys() == {"first", "steps"} and all(map(_is_number, value.values())):
        steps = range(value["first"], value["first"] + value["steps"])
    if not steps or steps[0] < 1:
        raise ValueError(
            f"it is {value!r}; expected the steps to profile, counted from 1, such as 10-12 or {{first: 10, steps: 3}}"
        )
    return steps


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _largest_operators(profiler: profile, device_type: str) -> Table:
    """Operators by their own time, without that of the operators that they call."""
    on_gpu = device_type == "cuda"
    times: dict[str, tuple[int, float]] = {}
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if not event.key.startswith("step "):
            times[event.key] = event.count, microseconds / 1000
    total = sum(milliseconds for _, milliseconds in times.values()) or 1.0
    table = Table("operator", title="largest operators of rank 0", title_justify="left", box=None)
    for heading in ("calls", "GPU ms" if on_gpu else "CPU ms", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.columns[0].overflow = "fold"
    for name, (calls, milliseconds) in sorted(times.items(), key=lambda item: -item[1][1])[:_OPERATORS_SHOWN]:
        table.add_row(name, f"{calls:,}", f"{milliseconds:,.1f}", f"{milliseconds / total:.0%}")
    return table


class OutOfMemoryHook(Hook):
    """Adds to an error about memory what this rank held, by category, and the changes of the plan that take less.

    Args:
        global_batch_size: samples in a step, over all data ranks.
    """

    def __init__(self, global_batch_size: int) -> None:
        self._samples = global_batch_size

    def on_error(self, trainer: "Trainer", error: Exception) -> None:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError):
            return
        engine = trainer.engine
        sizes = held_by_category(engine)
        lines = [f"rank {engine.mesh.rank} ran out of memory in step {trainer.step + 1}; it held"]
        lines += [f"  {name:<22}{size_text(size):>10}" for name, size in sizes.items()]
        changes = milder(engine.plan, self._samples // engine.mesh.dp_size)[:_LINES]
        if changes:
            lines.append(
                "These changes of train.plan take less, the mildest first; `tensorshard estimate` says how much:"
            )
            width = max(len(words) for words, _ in changes)
            lines += [f"  {words:<{width}}  {cost}" for words, cost in changes]
        else:
            lines.append("More processes, a smaller batch or a smaller model would take less.")
        error.add_note("\n".join(lines))


def held_by_category(engine: Engine) -> dict[str, int]:
    """Bytes of this rank's tensors on its device. A failed step has dropped its gradients and activations.

    On a GPU their peak is what torch's allocator says, less the others.
    """
    masters = list(engine.sharded.masters().values())
    states = (value for state in engine.optimizer.state.values() for value in _tensors(state))
    sizes = {
        "parameters": _nbytes(masters, engine.device),
        "optimizer states": _nbytes(states, engine.device),
        "buffers": _nbytes(engine.sharded.model.buffers(), engine.device),
    }
    if engine.device.type == "cuda":
        rest = torch.cuda.max_memory_allocated(engine.device) - sum(sizes.values())
        sizes["gradients, activations"] = max(0, rest)
    return sizes


def _tensors(state: Any) -> Iterable[torch.Tensor]:
    return (value for value in state.values() if isinstance(value, torch.Tensor))


def _nbytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    return sum(local.nbytes for local in map(to_local, tensors) if local.device.type == device.type)
