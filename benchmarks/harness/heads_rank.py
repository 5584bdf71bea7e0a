"""Measures one contender's steps of a head: the side of one rank."""

import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.harness.heads import OUT_OF_MEMORY, HeadJob
from benchmarks.harness.jobs import hand_in, load_job
from benchmarks.harness.meters import Meter, make_meter
from benchmarks.heads import LEARNING_RATE, Head, HeadWork

_CHUNK = 8192  # classes that are computed in fp64 at a time


def measure(job: HeadJob, rank: int, world_size: int) -> dict[str, Any]:
    """Builds the contender, compares its first step with fp64 if that is asked for, and measures the next ones."""
    head: Head = import_module(f"benchmarks.peers.{job.builder}").build(job.work, rank, world_size, **job.options)
    features, targets = job.work.batch()
    meter = make_meter(job.work.device)
    before = head.weight.to("cpu", copy=True) if job.exact else None  # not where room may be short
    loss = head.step(features, targets)
    error = 0.0
    if before is not None:
        assert features.grad is not None
        error = first_step_error(job.work, before, head.weight, loss, features, targets, rank, world_size)
        del before
    for _ in range(job.warmup_steps - 1):
        _step(head, features, targets, meter)
    features.grad = None
    meter.start()
    dist.barrier()
    cpu_start = time.process_time()
    seconds = [_step(head, features, targets, meter) for _ in range(job.measured_steps)]
    return {
        "step_seconds": seconds,
        "cpu_seconds": (time.process_time() - cpu_start) / job.measured_steps,
        "peak_bytes": meter.peak_bytes(),
        "state_bytes": sum(t.numel() * t.element_size() for t in head.states()),
        "error": error,
    }


def first_step_error(
    work: HeadWork,
    before: Tensor,
    after: Tensor,
    loss: Tensor,
    features: Tensor,
    targets: Tensor,
    rank: int,
    world_size: int,
) -> float:
    """How far a first step is from the same step in fp64, see :class:`HeadMeasurement`.

    Args:
        before: the weight's rows before the step, on the CPU.
    """
    x, start = features.detach().double(), work.first_class(rank, world_size)
    local = (targets - start).clamp(0, len(before) - 1)
    is_local = (targets >= start) & (targets < start + len(before))
    log_sum = torch.stack([(x @ rows.to(x).t()).logsumexp(1) for rows in before.split(_CHUNK)]).logsumexp(0)
    at_target = (x * before[local.cpu()].to(x)).sum(1) * is_local
    if world_size > 1:
        log_sums = [torch.empty_like(log_sum) for _ in range(world_size)]
        dist.all_gather(log_sums, log_sum)
        log_sum = torch.stack(log_sums).logsumexp(0)
        dist.all_reduce(at_target)
    expected_loss = (log_sum - at_target).mean()
    errors = [((loss.double() - expected_loss) / expected_loss).abs().item()]

    input_gradient, furthest, largest = torch.zeros_like(x), 0.0, 0.0
    for begin in range(0, len(before), _CHUNK):
        rows = before[begin : begin + _CHUNK].to(x)
        slope = (x @ rows.t()).sub_(log_sum[:, None]).exp_()
        inside = is_local & (local >= begin) & (local < begin + len(rows))
        slope[inside, local[inside] - begin] -= 1
        slope /= work.samples
        input_gradient += slope @ rows
        update = -LEARNING_RATE * slope.t() @ x
        furthest = max(furthest, (after[begin : begin + _CHUNK].double() - rows - update).abs().max().item())
        largest = max(largest, update.abs().max().item())
    if world_size > 1:
        dist.all_reduce(input_gradient)
    assert features.grad is not None
    errors.append(((features.grad.double() - input_gradient).abs().max() / input_gradient.abs().max()).item())
    errors.append(furthest / largest)
    return max(errors)


def _step(head: Head, features: Tensor, targets: Tensor, meter: Meter) -> float:
    features.grad = None
    meter.synchronize()
    start = time.perf_counter()
    head.step(features, targets)
    meter.synchronize()
    return time.perf_counter() - start


def main() -> None:
    job_file, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    job = load_job(job_file, HeadJob)
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo")
    try:
        outcome = measure(job, rank, dist.get_world_size())
    except torch.OutOfMemoryError:
        outcome = {OUT_OF_MEMORY: True}
    hand_in(job_file, rank, outcome)


if __name__ == "__main__":
    main()
