"""Measures pipelined contenders' steps: the side of one rank."""

import gc
import os
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed as dist

from benchmarks.harness.jobs import hand_in, load_job
from benchmarks.harness.pipelines import PipelineJob, RankPipelineMeasurement
from benchmarks.harness.turns import in_rotation


def measure(job: PipelineJob, rank: int, world_size: int) -> dict[str, RankPipelineMeasurement]:
    """Builds the contenders, warms them up and lets them take turns."""
    steps = {
        name: import_module(f"benchmarks.peers.{builder}").build(job.work, rank, world_size, **options)
        for name, (builder, options) in job.builders.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        for index in range(job.warmup_steps):
            loss = step(*job.work.batch(index))
            losses[name] += [] if loss is None else [loss]
    seconds: dict[str, list[list[float]]] = {name: [] for name in steps}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in steps}
    batch = job.work.batch(0)
    for name in in_rotation(list(steps), job.rounds):
        gc.collect()
        cpu_start, times = time.process_time(), []
        for _ in range(job.measured_steps):
            dist.barrier()
            start = time.perf_counter()
            steps[name](*batch)
            times.append(time.perf_counter() - start)
        seconds[name].append(times)
        cpu_seconds[name].append((time.process_time() - cpu_start) / job.measured_steps)
    return {name: RankPipelineMeasurement(seconds[name], cpu_seconds[name], losses[name]) for name in steps}


def main() -> None:
    torch.set_num_threads(1)
    job_file, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    measurements = measure(load_job(job_file, PipelineJob), rank, dist.get_world_size())
    outcome = {name: asdict(measurement) for name, measurement in measurements.items()}
    hand_in(job_file, rank, outcome)


if __name__ == "__main__":
    main()
