"""One rank's side of the planner's benchmark: an engine for each plan, which take steps in turn."""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import tensorshard as ts
from benchmarks.harness.jobs import hand_in, load_job
from benchmarks.harness.planner_models import MODELS, SAMPLES, batch, build
from benchmarks.harness.planner_runs import OPTIMIZER, RunsJob

_WARM_UP = 2  # steps of each engine that do not count


def main() -> None:
    torch.set_num_threads(1)
    job_file = Path(sys.argv[1])
    dist.init_process_group("gloo")
    job = load_job(job_file, RunsJob)
    refused, steps = [], []
    for fields in job.plans:
        step, failure = None, ""
        try:
            step = _make_step(job.model, ts.Plan.from_dict(fields))
        except Exception as error:
            failure = str(error).splitlines()[0] if str(error) else type(error).__name__
        failures: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        refused.append(next((failure for failure in failures if failure), ""))
        steps.append(None if refused[-1] else step)
    busy: list[list[float]] = [[] for _ in steps]
    wall: list[list[float]] = [[] for _ in steps]
    for number in range(_WARM_UP + job.rounds):
        for place, step in enumerate(steps):
            if step is None:
                continue
            dist.barrier()
            begin, computed = time.perf_counter(), time.process_time()
            step()
            if number >= _WARM_UP:
                busy[place].append(time.process_time() - computed)
                wall[place].append(time.perf_counter() - begin)
    hand_in(job_file, int(os.environ["RANK"]), {"refused": refused, "busy": busy, "wall": wall})


def _make_step(model: str, plan: ts.Plan) -> Callable[[], object]:
    """A step of an engine under `plan`."""
    case = MODELS[model]
    inputs, targets = batch(case, SAMPLES // plan.resolve(dist.get_world_size()).dp_size)
    engine = ts.parallelize(
        partial(build, case), plan, optimizer=OPTIMIZER, loss_fn=case.loss, device="cpu", sample_inputs=inputs
    )
    return partial(engine.step, inputs, targets)


if __name__ == "__main__":
    main()
