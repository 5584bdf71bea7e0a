"""``tensorshard plan --measure``: really takes steps under the best plans of a search, and puts the fastest first."""

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from tensorshard.comm.world import default_device, join_world
from tensorshard.config import instantiate
from tensorshard.parallelize.build import parallelize
from tensorshard.plan.plan import Plan
from tensorshard.predict.search import FoundPlan, PlanSearch
from tensorshard.trainer.initial_model import initial_model
from tensorshard.trainer.launch.launch_errors import WorkerFailedError
from tensorshard.trainer.launch.launcher import World, launch
from tensorshard.trainer.loaders import Collate

_STEPS = 2  # the first one makes the optimizer's states and fills caches; the last one counts


def measure_plans(search: PlanSearch, config: DictConfig, count: int) -> PlanSearch:
    """`search` with the seconds of a step under its `count` best plans; these come first, in the order of the seconds.

    Each plan is run by ranks of its own, as ``tensorshard train`` starts them. A plan that fails, as one that takes too
    much memory, comes last.

    Raises:
        LaunchError: this machine cannot run so many ranks.
        LaunchInterrupted: a signal ended the run.
    """
    world = World(nproc=search.world_size)
    measured = [_measure(one, config, search.global_batch, world) for one in search.plans[:count]]
    measured.sort(key=lambda one: (one.failed != "", one.measured_seconds or 0.0))
    fast = [one for one in measured if not one.failed]
    return replace(search, plans=[*fast, *search.plans[count:], *(one for one in measured if one.failed)])


def _measure(one: FoundPlan, config: DictConfig, global_batch: int, world: World) -> FoundPlan:
    with tempfile.TemporaryDirectory(prefix="tensorshard-plan-") as folder:
        results = Path(folder) / "seconds.json"
        try:
            launch(take_steps, (config, one.plan.to_dict(), global_batch, str(results)), world)
            return replace(one, measured_seconds=json.loads(results.read_text()))
        except WorkerFailedError as error:
            return replace(one, failed=(str(error).strip().splitlines() or ["it failed"])[-1])


def take_steps(config: DictConfig, plan: dict[str, Any], global_batch: int, results: str) -> None:
    """Takes steps on a rank; rank 0 writes the seconds of the last one, of the slowest rank, to the file `results`."""
    device = default_device()
    join_world(device)
    resolved = Plan.from_dict(plan).resolve(dist.get_world_size())
    samples, data = global_batch // resolved.dp_size, instantiate(config.data.train)
    inputs, targets = Collate.of(config)([data[index % len(data)] for index in range(samples)])
    engine = parallelize(
        initial_model(config.model),
        resolved,
        optimizer=instantiate(config.optimizer),
        loss_fn=instantiate(config.loss),
        sample_inputs=inputs,
    )
    seconds = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_STEPS):
        dist.barrier()
        begin = time.perf_counter()
        engine.step(inputs, targets)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.fill_(time.perf_counter() - begin)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(seconds.item()))
    dist.destroy_process_group()
