"""The update alone: the process that measures. Run by :mod:`benchmarks.harness.updates`."""

import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import distributed as dist

from benchmarks.harness.jobs import hand_in, load_job
from benchmarks.harness.updates import UpdateJob, run


def main() -> None:
    job_file = Path(sys.argv[1])
    job = load_job(job_file, UpdateJob)
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo")
    hand_in(job_file, int(os.environ["RANK"]), asdict(run(job)))


if __name__ == "__main__":
    main()
