"""The best plan for the world that this process is in: rank 0 searches for it, and all ranks take it."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.decisions import decide_once
from tensorshard.comm.forked import TriedInVain, in_forked_process
from tensorshard.comm.groups import world_group
from tensorshard.comm.world import ranks_here
from tensorshard.engine.optimizer import OptimizerFactory
from tensorshard.host.memory import room_for_rank
from tensorshard.model.batches import batch_size
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.tensors import map_tensors, tensor_leaves
from tensorshard.plan.plan import Plan
from tensorshard.predict.hardware import hardware_here
from tensorshard.predict.search.find_plans import find_plans
from tensorshard.predict.search.model_facts import model_facts
from tensorshard.predict.search.problem import fixed_fields
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.weights.files.pretrained_model import without_files


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
                targets=guess_targets(without_files(model), loss_fn, inputs, size) if targets is None else targets,
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


def guess_targets(
    model: nn.Module | Callable[[], nn.Module], loss_fn: Callable[[Any, Any], Any], inputs: Any, samples: int
) -> Any:
    """Zeros that ``loss_fn(model(inputs), targets)`` takes: classes, values like the output's, or the inputs.

    Args:
        inputs: a batch of `samples`.

    Raises:
        ValueError: the loss takes none of these.
    """
    facts = model_facts(model, inputs, samples)
    outputs = [] if facts is None else tensor_leaves(facts.output)
    if facts is not None and outputs:
        candidates = [torch.zeros(shape, dtype=dtype) for shape, dtype in _shapes(outputs[0])]
        for targets in (*candidates, inputs):
            if _is_taken(loss_fn, facts.output, targets):
                return targets
    raise ValueError(
        "sample_targets were not given, and could not be guessed: the loss takes neither classes nor values like the "
        "model's output nor its inputs; give sample_targets=, of one batch as Engine.step is given them"
    )


def _shapes(output: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    shape = tuple(output.shape)
    if output.dim() > 1 and shape[-1] > 1:
        yield shape[:-1], torch.long  # a class for each place
    if output.dim() > 2:
        yield (shape[0], *shape[2:]), torch.long  # channels come second, as in segmentation
    yield shape, torch.float32


def _is_taken(loss_fn: Callable[[Any, Any], Any], output: Any, targets: Any) -> bool:
    with QuickFakeTensorMode(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # such as the warning about shapes that are broadcast
        try:
            fakes = [map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype), tree) for tree in (output, targets)]
            loss_fn(*fakes)
        except Exception as error:  # a loss may raise anything for targets that do not suit it
            if isinstance(error, Warning) or raised_by_model(error):
                return False
            raise
    return True
