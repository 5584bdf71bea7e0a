"""The best plan for the world that this process is in: rank 0 searches for it, and all ranks take it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from tensorshard.comm.decisions import decide_once
from tensorshard.comm.forked import TriedInVain, in_forked_process
from tensorshard.comm.groups import world_group
from tensorshard.comm.world import ranks_here
from tensorshard.engine.optimizer import OptimizerFactory
from tensorshard.host.memory import room_for_rank
from tensorshard.model.batches import batch_size
from tensorshard.plan.plan import Plan
from tensorshard.predict.search.find_plans import find_plans
from tensorshard.predict.search.guessed_targets import guess_targets
from tensorshard.predict.search.machine import hardware_here
from tensorshard.predict.search.problem import fixed_fields


def choose_plan(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: OptimizerFactory,
    loss_fn: Callable[[Any, Any], Any],
    inputs: Any,
    targets: Any,
    fixed: Plan | Mapping[str, Any] | None,
) -> Plan:
    """The best plan, the same on every rank. A collective of the world.

    The search runs in a fork of rank 0, which is in no process group and leaves nothing behind. It prints its choice.

    Args:
        inputs, targets: as for :func:`tensorshard.parallelize`; without targets, they are guessed.

    Raises:
        ValueError: nothing fits, or an argument makes no sense.
    """
    ranks = dist.get_world_size()

    def choose() -> dict[str, Any]:
        size = batch_size(inputs)
        given = fixed_fields(fixed)
        hardware = hardware_here()  # a fork cannot ask a GPU
        memory = room_for_rank(ranks_here()) if hardware.is_cpu else None  # a container may have less than the machine

        def search() -> tuple[dict[str, Any], str]:
            found = find_plans(
                model,
                world_size=ranks,
                inputs=inputs,
                targets=guess_targets(model, loss_fn, inputs, size) if targets is None else targets,
                optimizer=optimizer,
                loss_fn=loss_fn,
                hardware=hardware,
                memory=memory,
                fixed=given,
                top=1,
            )
            return found.best.plan.to_dict(), found.describe()

        try:
            plan, said = in_forked_process(search, None, shown=True)
        except TriedInVain as error:
            raise ValueError(f"plan 'auto': {error}") from error
        print(f"the best plan for {said}", flush=True)
        return plan

    return Plan.from_dict(decide_once(choose, world_group()))
