"""Context parallelism before training: on simulated ranks, the model computes what it computes alone."""

import gc
import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.decisions import decide_once
from tensorshard.common.words import first_line
from tensorshard.context_parallel.split_sequences import SplitSequences
from tensorshard.model.global_state import restored_globals
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.tensors import tensor_leaves
from tensorshard.model.whole_sequences import PositionOrder
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.tensor_parallel.table.layouts import REPLICATED
from tensorshard.tensor_parallel.verify.block_calls import as_call
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.comparison import (
    BlockRun,
    MismatchError,
    compare_gradients,
    compare_outputs,
)
from tensorshard.tensor_parallel.verify.model_run import find_units, run_once, without_repetition
from tensorshard.tensor_parallel.verify.simulated_ranks import run_as_ranks
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily
from tensorshard.torch_private.process_groups import alone_in_the_world
from tensorshard.weights.initial import TensorSource

logger = logging.getLogger("tensorshard")

_MOST_INPUTS = 1 << 20
_MOST_PARAMETERS = 1 << 28
"""Models of more elements, with two of each kind of block, would take the first rank too long."""


@dataclass(frozen=True)
class SequenceCheck:
    """What was found out before training.

    Args:
        gathered: (operation, line of the user's code) -> how often a forward computes it on whole sequences.
        unchecked: why nothing was compared; "" if it was.
    """

    gathered: Mapping[tuple[str, str], int] = field(default_factory=dict)
    unchecked: str = ""


def check_sequences(source: TensorSource, plan: Plan, mesh: Mesh, inputs: Any = None) -> SequenceCheck:
    """Compares the source's model on the ranks of ``plan.cp`` with the model alone: outputs and gradients.

    The first rank does that, on random weights, two blocks of each kind, and a few samples and positions. It says which
    operations need whole sequences. A collective of the mesh.

    Args:
        inputs: samples to run the model on; None to guess them.

    Raises:
        ValueError: they differ, or the model does not run on parts of sequences.
    """

    def check() -> SequenceCheck:
        with source.real_buffers(), restored_globals(source.module), alone_in_the_world():
            sequence_check = _check(source.module, plan, inputs)
        gc.collect()
        return sequence_check

    with unset_fake_temporarily():
        sequence_check = decide_once(check, mesh.world_group)
    if mesh.rank == 0:
        if sequence_check.unchecked:
            logger.warning("context parallelism was not checked before training: %s", sequence_check.unchecked)
        for (operation, line), times in sequence_check.gathered.items():
            logger.warning(
                "context parallelism: %s (%s) is computed on whole sequences, by every rank, %d times in a forward of "
                "two blocks of each kind, which is exact, and takes time and memory",
                operation,
                line,
                times,
            )
    return sequence_check


def _check(model: nn.Module, plan: Plan, inputs: Any) -> SequenceCheck:
    try:
        run = run_once(model, list(find_units(model)), inputs, 2 * plan.cp, sequences=True)
    except ValueError as error:
        return SequenceCheck(unchecked=first_line(error))
    if sum(leaf.numel() for leaf in tensor_leaves(run.inputs)) > _MOST_INPUTS:
        return SequenceCheck(unchecked="give parallelize(sample_inputs=...) inputs of fewer samples or positions")
    why = ""
    for candidate in (without_repetition(model, run.kinds), model):  # some models need all of their blocks
        if sum(parameter.numel() for parameter in candidate.parameters()) > _MOST_PARAMETERS:
            return SequenceCheck(unchecked=why or "its blocks are too large to be run on the first rank's host")
        try:
            made = BlockCheck(candidate, as_call(run.inputs), plan.cp)
        except Exception as caught:
            if not raised_by_model(caught):
                raise
            why = f"the model does not run on random weights: {first_line(caught)}"
            continue
        if not made.expected.is_a_number:
            return SequenceCheck(unchecked="the model computes what is no number on random weights")
        return _compared_or_refused(made, candidate, run.inputs, plan)
    return SequenceCheck(unchecked=why)


def _compared_or_refused(made: BlockCheck, model: nn.Module, inputs: Any, plan: Plan) -> SequenceCheck:
    """What the comparison finds.

    Raises:
        ValueError: the model computes something else on parts of sequences.
    """
    error: Exception
    try:
        return SequenceCheck(_compared(made, plan))
    except Exception as caught:
        error = caught
    if made.draws or _draws(made):  # ranks that are threads draw from one generator, one after the other
        return SequenceCheck(unchecked="the model draws random numbers in evaluation")
    with suppress(Exception):  # through many layers rounding may grow as large as a mistake; some models take no fp64
        return SequenceCheck(_compared(BlockCheck(model, as_call(inputs), plan.cp, dtype=torch.float64), plan))
    what = "computes something else" if isinstance(error, MismatchError) else f"raises {type(error).__name__}"
    raise ValueError(
        f"cp={plan.cp} was given, but on {plan.cp} simulated ranks, each with its part of the sequences, the model "
        f"{what}: {first_line(error)}. Say which dimensions are sequences in cp_dims, or set cp=1"
    ) from error


def _draws(made: BlockCheck) -> bool:
    before = torch.get_rng_state()
    args, kwargs = made.make_inputs()
    with torch.no_grad():
        made.make_copy()(*args, **kwargs)
    return not torch.equal(before, torch.get_rng_state())


def _compared(made: BlockCheck, plan: Plan) -> Mapping[tuple[str, str], int]:
    """Runs the model on simulated ranks, and compares. Returns the operations on whole sequences."""
    expected = made.expected
    order = plan.cp_order if plan.cp_order != "auto" else "contiguous"

    def on_rank(group: dist.ProcessGroup) -> tuple[BlockRun, Mapping[tuple[str, str], int]]:
        block = made.make_copy()
        keeps_keys = plan.recompute == "full"
        sequences = SplitSequences(
            block, group, plan.cp_dims, order=PositionOrder(order), keeps_keys=keeps_keys, listed=None
        )
        args, kwargs = made.make_inputs()
        with sequences.active():
            outputs = tensor_leaves(sequences.whole(block(*args, **kwargs)))
            pairs = [pair for pair in zip(outputs, made.cotangents, strict=True) if pair[0].requires_grad]
            if pairs:
                sum(((output * cotangent).sum() / plan.cp for output, cotangent in pairs), torch.zeros(())).backward()
        gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
        return BlockRun([output.detach() for output in outputs], [], gradients), dict(sequences.gathered_operations)

    of_ranks = run_as_ranks(plan.cp, on_rank)
    runs = [run for run, _ in of_ranks]
    for output, full in zip(runs[0].outputs, expected.outputs, strict=True):
        if output.shape != full.shape:
            raise MismatchError(f"an output has the shape {list(output.shape)}, and alone {list(full.shape)}")
    compare_outputs(runs, expected)
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    for run in runs:
        for name, gradient in run.gradients.items():
            parts[name].append(gradient)
    whole = {name: torch.stack(gradients).sum(0) for name, gradients in parts.items()}
    compare_gradients(
        [replace(runs[0], gradients=whole)],
        replace(expected, input_gradients=[]),
        defaultdict(lambda: REPLICATED),
        {},
    )
    return of_ranks[0][1]
