"""Training with a limit on memory: the side of one rank. Run by :mod:`benchmarks.harness.offloaded_training`."""

import os
import sys
from pathlib import Path

from benchmarks.harness.memory_group import join


def main() -> None:
    join()  # before torch is loaded, so that all of this process counts
    from benchmarks.harness.jobs import hand_in, load_job
    from benchmarks.harness.offloaded_training import OffloadJob
    from benchmarks.harness.offloaded_training_run import run

    job_file, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    hand_in(job_file, rank, run(load_job(job_file, OffloadJob), rank, int(os.environ["WORLD_SIZE"])))


if __name__ == "__main__":
    main()
