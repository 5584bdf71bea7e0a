"""Finds how many classes a head can have on a group of GPUs: the side of the one rank that is trained.

The other ranks do not exist: torch's process group "fake" takes their part in every exchange, and does not change what
is received. So the results are wrong, but the memory is the same as with all ranks.
"""

import gc
import sys
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness.heads_fit import Fit, FitJob, most_that_fit
from benchmarks.harness.jobs import hand_in, load_job
from benchmarks.harness.meters import make_meter
from benchmarks.heads import HeadWork

_TRAINED_STEPS = 2  # the first makes the momentum


def measure(job: FitJob) -> Fit:
    """Finds the most classes for each budget."""
    bytes_per_class = _train(job, job.work) * job.ranks / job.work.classes
    class_counts = [
        most_that_fit(lambda classes, budget=budget: _fits(job, classes, budget), int(limit))
        for budget, limit in ((budget, budget / bytes_per_class * job.ranks) for budget in job.budgets)
    ]
    return Fit(bytes_per_class, class_counts)


def _fits(job: FitJob, classes: int, budget: int) -> bool:
    """Whether a head of so many classes can be trained in `budget` bytes of this rank's memory."""
    work = replace(job.work, classes=classes)
    gc.collect()
    if work.device == "cpu":  # a CPU's memory cannot be limited
        meter = make_meter(work.device)
        meter.start()
        _train(job, work)
        return meter.peak_bytes() <= budget
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties().total_memory)
    try:
        _train(job, work)
    except torch.OutOfMemoryError:
        return False
    return True


def _train(job: FitJob, work: HeadWork) -> int:
    """Trains the first rank's part and returns the bytes of its states, all of which are gone by then."""
    head = import_module(f"benchmarks.peers.{job.builder}").build(work, 0, job.ranks, **job.options)
    features, targets = work.batch()
    for _ in range(_TRAINED_STEPS):
        features.grad = None
        head.step(features, targets)
    make_meter(work.device).synchronize()
    return sum(state.numel() * state.element_size() for state in head.states())


def main() -> None:
    job_file = Path(sys.argv[1])
    job = load_job(job_file, FitJob)
    dist.init_process_group("fake", rank=0, world_size=job.ranks, store=FakeStore())
    hand_in(job_file, 0, asdict(measure(job)))


if __name__ == "__main__":
    main()
