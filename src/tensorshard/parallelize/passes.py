"""Applies the transforms to one model, or one stage: tensor, logits, recompute, compile, precision, shard."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.loss.logits.output_layers import OutputLogits
from tensorshard.model.parameters import assign_buffers
from tensorshard.parallelize.output_logits import find_output_logits
from tensorshard.passes.batch_norm import synchronize_batch_norm
from tensorshard.passes.compile import compile_blocks
from tensorshard.passes.mixed_types import give_one_type
from tensorshard.passes.precision import DTYPES, keep_norms_fp32
from tensorshard.passes.recompute import apply_recompute
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import Storage
from tensorshard.sharded.sharded_model import ShardedModel
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit

logger = logging.getLogger("tensorshard")

Values = Callable[[str], torch.Tensor]
"""Returns the whole value of a parameter or buffer, by its name, on this rank's device."""


@dataclass(frozen=True)
class Part:
    """What one rank lays out: a model, or a stage of one.

    Args:
        module: on the meta device.
        repeated: the blocks, which are recomputed and compiled one by one.
        units: lists of modules whose parameters are gathered and reduced together.
        computed: the modules that this rank computes.
        returns: whether the part returns the model's output, and not the input of another stage.
    """

    module: nn.Module
    repeated: list[nn.Module]
    units: list[list[nn.Module]]
    computed: list[nn.Module]
    returns: bool = True


def lay_out(
    part: Part,
    value_of: Values,
    split_tensors: Callable[[], TensorSplit],
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
    storage: Storage,
) -> ShardedModel:
    """Applies the transforms to `part`, and fills it.

    Args:
        storage: where values are kept.
        value_of: called for one name after the other, in the model's order if other ranks depend on the order.
        split_tensors: splits the part over the tensor-parallel ranks.
    """
    names = [name for name, _ in part.module.named_parameters()]
    within = {inner for module in part.computed for inner in module.modules()}
    computed = {name: module for name, module in part.module.named_modules() if module in within}
    synchronize_batch_norm(computed, mesh.dp_group if mesh.dp_size > 1 else None)
    if plan.precision != "fp32":
        keep_norms_fp32(computed.values())
        give_one_type(computed.values())
    split = split_tensors()
    logits = OutputLogits()
    if part.returns:
        logits = find_output_logits(
            part.module,
            part.computed,
            plan,
            mesh,
            repeated=part.repeated,
            gathered=part.units if plan.shards_parameters else [],
            split_outputs=split.outputs.sizes,
        )
    apply_recompute(part.repeated, plan.recompute, {module: name for name, module in part.module.named_modules()})
    if plan.compile:
        for sentence in compile_blocks(part.repeated, plan.recompute):
            if mesh.rank == 0:
                logger.warning("compile=True: %s", sentence)
    storage.move_activations(part.repeated)
    reduce_dtype = DTYPES[plan.reduce_dtype or "fp32"]

    def local_value(name: str) -> torch.Tensor:
        return split.local(name, value_of(name))

    assign_buffers(part.module, local_value, device)
    if plan.shards_parameters:
        from tensorshard.data_parallel.fully_sharded import FullyShardedModel

        sharded = FullyShardedModel(
            part.module,
            local_value,
            part.units,
            mesh,
            split,
            precision=plan.precision,
            reduce_dtype=reduce_dtype,
            storage=storage,
        )
        sharded.logits = logits
        _show_whole(part.module, split, sharded)
        return sharded
    from tensorshard.data_parallel.replicated import ReplicatedModel

    replicated = ReplicatedModel(
        part.module,
        ((name, local_value(name)) for name in names),
        part.units,
        mesh,
        split,
        level=int(plan.zero),
        precision=plan.precision,
        reduce_dtype=reduce_dtype,
        storage=storage,
    )
    replicated.logits = logits
    _show_whole(part.module, split, replicated)
    return replicated


def _show_whole(module: nn.Module, split: TensorSplit, sharded: ShardedModel) -> None:
    if split.size > 1:
        from tensorshard.tensor_parallel.apply.whole_parameters import WholeParameters

        sharded.whole_views.append(WholeParameters(module, split, sharded.full_shapes()))


def from_first_rank(value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """`value` as the mesh's first rank has it. A collective of the mesh.

    The value is received into a copy: `value` may be the user's own memory, and the plan may still be refused.
    """
    value = value.contiguous() if mesh.rank == 0 else value.clone(memory_format=torch.contiguous_format)
    dist.broadcast(value, group=mesh.world_group, group_src=0)
    return value
