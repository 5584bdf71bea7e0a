"""Measures training on long sequences: the side of one rank."""

import os
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed as dist

from benchmarks.harness.jobs import hand_in, load_job
from benchmarks.harness.memory_group import join
from benchmarks.harness.meters import ResidentMemory
from benchmarks.harness.sequences import SequenceJob, SequenceMeasurement
from benchmarks.harness.turns import in_rotation

TOLERANCE = 1e-5  # relative; sums of fp32 in other orders make about 1e-7


class LossMismatchError(AssertionError):
    """A contender does not compute what one process does, so its time cannot be compared."""


def measure(job: SequenceJob, rank: int, world_size: int) -> dict[str, SequenceMeasurement]:
    """Builds the contenders, compares their first losses, and lets them take turns."""
    meter = ResidentMemory()
    meter.start()
    built = {
        name: import_module(f"benchmarks.peers.{builder}").build(job.work, rank, world_size, **options)
        for name, (builder, options) in job.builders.items()
    }
    losses = {name: step() for name, (step, _) in built.items()}
    for name, loss in losses.items():
        if job.expected is not None and not abs(loss - job.expected) <= TOLERANCE * abs(job.expected):
            raise LossMismatchError(f"the first loss of {name} is {loss}, not {job.expected}")
    for step, _ in built.values():  # in the order of positions that was chosen after the first step
        step()
    seconds: dict[str, list[float]] = {name: [] for name in built}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in built}
    received = dict.fromkeys(built, 0)
    for name in in_rotation(list(built), job.rounds):
        step, bytes_so_far = built[name]
        dist.barrier()
        start, cpu_start, before = time.perf_counter(), time.process_time(), bytes_so_far()
        step()
        seconds[name].append(time.perf_counter() - start)
        cpu_seconds[name].append(time.process_time() - cpu_start)
        received[name] = bytes_so_far() - before
    return {
        name: SequenceMeasurement(losses[name], seconds[name], cpu_seconds[name], meter.peak_bytes(), received[name])
        for name in built
    }


def main() -> None:
    join()
    torch.set_num_threads(1)
    job_file, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    measured = measure(load_job(job_file, SequenceJob), rank, dist.get_world_size())
    hand_in(job_file, rank, {name: asdict(measurement) for name, measurement in measured.items()})


if __name__ == "__main__":
    main()
