"""Resident memory of a real run: one rank, in its own process. The benchmark of estimates runs it."""

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tensorshard as ts
from benchmarks.harness import memory
from benchmarks.harness.jobs import hand_in, load_job
from benchmarks.workload import OPTIMIZER, Workload, loss_fn

_WARM = Workload("tiny", num_layers=1, num_heads=2, width=16, vocab_size=32, context_length=8, batch_size=4)


@dataclass(frozen=True)
class ResidentJob:
    """Steps of a workload under a plan, the first of which makes the optimizer's states."""

    workload: Workload
    fields: dict[str, Any]
    steps: int = 3


def make_engine(workload: Workload, fields: dict[str, Any]) -> ts.Engine:
    return ts.parallelize(partial(workload.model), ts.Plan(**fields), optimizer=OPTIMIZER, loss_fn=loss_fn)


def main() -> None:
    torch.set_num_threads(1)
    job_file = Path(sys.argv[1])
    job = load_job(job_file, ResidentJob)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    # A tiny model runs first, under the same plan, since memory that libraries and groups allocate once is not the
    # model's.
    warm = make_engine(_WARM, job.fields)
    for step in range(2):
        warm.step(*_WARM.batch(step, warm.mesh.dp_rank))
    batches = [job.workload.batch(step, warm.mesh.dp_rank) for step in range(job.steps)]
    del warm
    before = memory.resident_bytes()
    engine = make_engine(job.workload, job.fields)
    dist.barrier()
    memory.reset_peak()  # memory that only the initialisation took does not count
    for batch in batches:
        engine.step(*batch)
    peak = memory.peak_resident_bytes()
    hand_in(job_file, rank, {"peak": peak - before, "stage": engine.mesh.index("pp")})


if __name__ == "__main__":
    main()
