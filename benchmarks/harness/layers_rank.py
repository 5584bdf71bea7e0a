"""Measures contenders' forward and backward through one layer: the side of one rank."""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist

from benchmarks.harness import memory
from benchmarks.harness.jobs import hand_in, load_job
from benchmarks.harness.layers import LayerJob, RankLayerMeasurement
from benchmarks.harness.turns import in_rotation

TOLERANCE = 2e-5  # relative to the largest element; fp32 sums in other orders make about 1e-6


class LayerMismatchError(AssertionError):
    """A contender does not compute what the plain layer does, so its time cannot be compared."""


def measure(job: LayerJob, rank: int, world_size: int) -> dict[str, RankLayerMeasurement]:
    """Builds the contenders, checks them against the plain layer, and lets them take turns."""
    inputs, gradient = job.work.batch()
    expected = _outcome(job.work.module(), inputs, gradient)
    steps: dict[str, Callable[[], None]] = {}
    for name, (builder, options) in job.builders.items():
        module = import_module(f"benchmarks.peers.{builder}").build(job.work, rank, world_size, **options)
        check_same(name, _outcome(module, inputs, gradient), expected)
        steps[name] = _step_of(module, inputs, gradient)
    for step in steps.values():
        for _ in range(job.warmup_steps):
            step()

    seconds: dict[str, list[list[float]]] = {name: [] for name in steps}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in steps}
    peak_bytes = dict.fromkeys(steps, 0)
    for name in in_rotation(list(steps), job.rounds):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        dist.barrier()
        memory.reset_peak()
        bytes_before, cpu_start = memory.resident_bytes(), time.process_time()
        seconds[name].append([_seconds(steps[name]) for _ in range(job.measured_steps)])
        cpu_seconds[name].append((time.process_time() - cpu_start) / job.measured_steps)
        peak_bytes[name] = max(peak_bytes[name], memory.peak_resident_bytes() - bytes_before)
    return {name: RankLayerMeasurement(seconds[name], cpu_seconds[name], peak_bytes[name]) for name in steps}


def check_same(name: str, outcome: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compares a contender's output and its input's gradient with the plain layer's.

    Raises:
        LayerMismatchError: one of them differs by more than :data:`TOLERANCE`.
    """
    for what, value, wanted in zip(("output", "gradient of the input"), outcome, expected, strict=True):
        if value.shape != wanted.shape:
            raise LayerMismatchError(f"the {what} of {name} is {list(value.shape)}, not {list(wanted.shape)}")
        apart = ((value - wanted).abs().max() / wanted.abs().max()).item()
        if not apart <= TOLERANCE:  # written so that NaN fails
            raise LayerMismatchError(
                f"the {what} of {name} is {apart:.2g} from the plain layer's, relative to the largest element; "
                f"at most {TOLERANCE:g} is rounding"
            )


def _outcome(module: nn.Module, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    output = module(inputs)
    output.backward(gradient)
    assert inputs.grad is not None
    outcome = output.detach().clone(), inputs.grad
    _forget(module, inputs)
    return outcome


def _step_of(module: nn.Module, inputs: Tensor, gradient: Tensor) -> Callable[[], None]:
    def step() -> None:
        module(inputs).backward(gradient)
        _forget(module, inputs)

    return step


def _forget(module: nn.Module, inputs: Tensor) -> None:
    inputs.grad = None
    for parameter in module.parameters():
        parameter.grad = None


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    job_file, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    measurements = measure(load_job(job_file, LayerJob), rank, dist.get_world_size())
    outcome = {name: asdict(measurement) for name, measurement in measurements.items()}
    hand_in(job_file, rank, outcome)


if __name__ == "__main__":
    main()
