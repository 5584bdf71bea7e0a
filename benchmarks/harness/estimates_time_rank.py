"""One rank's side of the comparison of step times."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tensorshard as ts
from benchmarks.harness.estimates_time import TimeJob
from benchmarks.harness.jobs import hand_in, load_job
from benchmarks.workload import OPTIMIZER, loss_fn


def cpu_seconds(job: TimeJob) -> float:
    """Computing seconds of this rank in a step: the fastest step after the first two."""
    engine = ts.parallelize(
        job.model.model,
        ts.Plan(**job.fields),
        optimizer=OPTIMIZER,
        loss_fn=loss_fn,
        device="cpu",
        sample_inputs=job.model.batch(0, 0)[0],
    )
    inputs, targets = job.model.batch(0, engine.mesh.dp_rank)
    found = []
    for _ in range(2 + job.steps):
        begin = time.process_time()
        engine.step(inputs, targets)
        found.append(time.process_time() - begin)
    return min(found[2:])


def main() -> None:
    torch.set_num_threads(1)
    job_file = Path(sys.argv[1])
    dist.init_process_group("gloo")
    job = load_job(job_file, TimeJob)
    hand_in(job_file, int(os.environ["RANK"]), {"cpu_seconds": cpu_seconds(job)})


if __name__ == "__main__":
    main()
