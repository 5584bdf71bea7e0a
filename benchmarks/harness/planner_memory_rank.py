"""One rank's side of a plan within a limit on memory. Run by :mod:`benchmarks.harness.planner_memory`."""

import os
import sys
from pathlib import Path

from benchmarks.harness.memory_group import join


def main() -> None:
    join()  # before torch is loaded, so that all of this process counts
    from dataclasses import replace

    import torch
    from torch import distributed as dist

    import tensorshard as ts
    from benchmarks.harness.jobs import hand_in, load_job
    from benchmarks.harness.planner_memory import MemoryJob
    from benchmarks.workload import OPTIMIZER, loss_fn

    torch.set_num_threads(1)
    job_file = Path(sys.argv[1])
    job = load_job(job_file, MemoryJob)
    dist.init_process_group("gloo")
    work = replace(job.work, batch_size=job.samples)
    plan = ts.Plan.from_dict(job.fields)
    inputs, _ = work.batch(0, 0)
    torch.manual_seed(0)
    engine = ts.parallelize(
        work.constructed, plan, optimizer=OPTIMIZER, loss_fn=loss_fn, device="cpu", sample_inputs=inputs
    )
    loss = [engine.step(*work.batch(step, engine.mesh.dp_rank)).item() for step in range(job.steps)]
    hand_in(job_file, int(os.environ["RANK"]), {"loss": loss[-1]})


if __name__ == "__main__":
    main()
