"""Measures one contender's training: the side of one rank. Run by :mod:`benchmarks.harness.training`."""

import os
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed as dist

from benchmarks.harness import memory
from benchmarks.harness.jobs import hand_in, load_job
from benchmarks.harness.training import RankMeasurement, TrainingJob
from benchmarks.harness.turns import my_turn


def measure(job: TrainingJob, rank: int, world_size: int) -> RankMeasurement:
    """Builds the contender, trains, and reports times, losses and memory.

    Where others train beside it, building it with its first steps is one turn, and each measured step another.
    """
    turn = my_turn()
    workload = job.workload
    batches = [workload.batch(step, rank) for step in range(job.warmup_steps + job.measured_steps)]
    baseline_bytes = memory.resident_bytes()

    with turn():
        step = import_module(job.builder).build(workload.model, rank, world_size, **job.options)
        losses = [step(*batch) for batch in batches[: job.warmup_steps]]

        build_peak_bytes = memory.peak_resident_bytes()
        dist.barrier()
        memory.reset_peak()
    step_seconds, cpu_seconds = [], 0.0
    for inputs, targets in batches[job.warmup_steps :]:
        with turn():
            start, cpu_start = time.perf_counter(), time.process_time()
            losses.append(step(inputs, targets))
            step_seconds.append(time.perf_counter() - start)
            cpu_seconds += (time.process_time() - cpu_start) / job.measured_steps
    steady_peak_bytes = memory.peak_resident_bytes()

    return RankMeasurement(
        step_seconds=step_seconds,
        cpu_seconds=cpu_seconds,
        losses=losses,
        steady_peak_bytes=steady_peak_bytes,
        process_peak_bytes=max(build_peak_bytes, steady_peak_bytes),
        baseline_bytes=baseline_bytes,
    )


def main() -> None:
    torch.set_num_threads(1)
    job_file = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    measurement = measure(load_job(job_file, TrainingJob), rank, int(os.environ["WORLD_SIZE"]))
    hand_in(job_file, rank, asdict(measurement))


if __name__ == "__main__":
    main()
