"""Trains on one rank, and measures the steps."""

import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.harness import memory
from benchmarks.harness.offloaded_training import OffloadJob, RankMeasurement
from benchmarks.harness.raw_disk import raw_bytes_per_second


def run(job: OffloadJob, rank: int, world_size: int) -> dict[str, Any]:
    """Runs one step that is not measured, which makes the states; then the measured steps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()  # ranks share the disk as they will in training
    raw = raw_bytes_per_second(Path(job.folder), job.work.raw_bytes // world_size)
    step = import_module(f"benchmarks.peers.{job.builder}").build(job.work, rank, world_size, job.folder, **job.options)
    losses = [step(*job.work.batch(0, rank))]
    step.finish()
    dist.barrier()
    moved, processor, seconds = memory.disk_bytes(), time.process_time(), []
    for number in range(1, job.steps + 1):
        began = time.perf_counter()
        losses.append(step(*job.work.batch(number, rank)))
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    step.finish()  # work that the last step left counts as part of it
    seconds[-1] += time.perf_counter() - began
    read, written = (now - then for now, then in zip(memory.disk_bytes(), moved, strict=True))
    return asdict(
        RankMeasurement(
            step_seconds=seconds,
            compute_seconds=(time.process_time() - processor) / job.steps / torch.get_num_threads(),
            read_bytes=read / job.steps,
            written_bytes=written / job.steps,
            raw_bytes_per_second=raw,
            peak_bytes=memory.peak_resident_bytes(),
            losses=losses,
            on_disk=step.on_disk(),
        )
    )
