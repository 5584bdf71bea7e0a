"""The passes that turn a model, or one stage of a pipeline, into a rank's part of it. :data:`PASSES` is their order."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import nn

from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.loss.logits.output_layers import OutputLayer, OutputLogits
from tensorshard.model.blocks import is_transposed
from tensorshard.model.forwards import TENSOR_PARALLEL_ROLES, Role, roles_of, runs_forward_of
from tensorshard.model.parameters import assign_buffers
from tensorshard.parallelize.checks import tensor_split_of
from tensorshard.parallelize.part import Part, PassContext
from tensorshard.passes.batch_norm import synchronize_batch_norm
from tensorshard.passes.compile import compile_blocks
from tensorshard.passes.precision import DTYPES, give_one_type, keep_norms_fp32
from tensorshard.passes.recompute import apply_recompute
from tensorshard.passes.tiles import apply_tiles
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.schedules import find_schedule
from tensorshard.torch_private.modules import own_parameters

logger = logging.getLogger("tensorshard")


def apply_passes(part: Part, context: PassContext) -> ShardedModel:
    """Applies all passes to `part`, and fills it with its values."""
    for apply in PASSES:
        apply(part, context)
    assert part.sharded is not None
    return part.sharded


def batch_norm(part: Part, context: PassContext) -> None:
    """Statistics of a batch are those of all data ranks."""
    synchronize_batch_norm(part.computed, context.mesh.dp_group if context.mesh.dp_size > 1 else None)


def precision(part: Part, context: PassContext) -> None:
    """Norms compute in fp32, and functions that want one type get it. Autocast surrounds the model's calls later."""
    if context.plan.precision != "fp32":
        keep_norms_fp32(part.computed.values())
        give_one_type(part.computed.values())


def tensor_parallel(part: Part, context: PassContext) -> None:
    """Layers compute this rank's part, random numbers are split, and blocks take parts of a sequence."""
    if context.by_hand:
        part.split = tensor_split_of(context.by_hand, context.mesh.group("tp"))
    elif context.table is not None:
        from tensorshard.parallelize.split_tensors import split_tensors

        part.split = split_tensors(part, context.table, context)


def expert_parallel(part: Part, context: PassContext) -> None:
    """Experts compute the tokens of all ranks that chose them."""
    if context.experts:
        from tensorshard.parallelize.split_experts import split_all_experts

        experts = split_all_experts(
            part.module,
            part.full_model,
            context.experts,
            context.mesh.expert_group,
            outer=part.split,
            cuts_sequences=context.mesh.degrees["cp"] > 1,
        )
        part.split = replace(part.split, experts=experts)


def context_parallel(part: Part, context: PassContext) -> None:
    """Sequences are cut over the ranks of context parallelism."""
    if context.mesh.degrees["cp"] > 1:
        from tensorshard.context_parallel.split_sequences import SplitSequences

        part.sequences = SplitSequences(
            part.module,
            context.mesh.group("cp"),
            context.plan.cp_dims,
            order=context.order,
            keeps_keys=context.plan.recompute == "full",
            listed=context.gathered_operations,
        )


def tiled_logits(part: Part, context: PassContext) -> None:
    """Output layers return logits that the loss computes in tiles."""
    if part.returns_output:
        part.logits = find_output_logits(
            part.module,
            part.computed.values(),
            context.plan,
            context.mesh,
            blocks=part.blocks,
            gathered=part.units if context.plan.shards_parameters else [],
            split_outputs=part.split.outputs.sizes,
            parameters=context.parameters,
        )


def tiles(part: Part, context: PassContext) -> None:
    """Norms and MLPs of blocks compute a part of the positions at a time."""
    apply_tiles(part.blocks, context.plan.tiles, {module: name for name, module in part.module.named_modules()})


def recompute(part: Part, context: PassContext) -> None:
    """Blocks compute their activations again in backward."""
    names = {module: name for name, module in part.module.named_modules()}
    apply_recompute(part.blocks, context.plan.recompute, names)


def compilation(part: Part, context: PassContext) -> None:
    """Blocks are compiled."""
    if context.plan.compile:
        for sentence in compile_blocks(part.blocks, context.plan.recompute):
            if context.mesh.rank == 0:
                logger.warning("compile=True: %s", sentence)


def offloaded_activations(part: Part, context: PassContext) -> None:
    """What blocks keep for backward goes to another tier; with recomputation, their inputs."""
    context.storage.move_activations(part.blocks)


def buffers(part: Part, context: PassContext) -> None:
    """Buffers get their values."""
    assign_buffers(part.module, part.local_value, context.device)


def data_parallel(part: Part, context: PassContext) -> None:
    """Parameters get their values, and are sharded as the ZeRO level says; gradients are summed."""
    from tensorshard.data_parallel.zero_model import ZeroModel

    plan = context.plan
    names = [name for name, _ in part.module.named_parameters()]
    part.sharded = ZeroModel(
        part.module,
        ((name, part.local_value(name)) for name in names),
        part.units,
        context.mesh,
        part.split,
        level=int(plan.zero),
        precision=plan.precision,
        reduce_dtype=DTYPES[plan.reduce_dtype or "fp32"],
        storage=context.storage,
    )
    part.sharded.logits = part.logits
    part.sharded.sequences = part.sequences


def full_parameters(part: Part, context: PassContext) -> None:
    """Split parameters look full to code that is not the model's."""
    assert part.sharded is not None
    if part.split.splits:
        from tensorshard.tensor_parallel.apply.user_views import UserViews

        part.sharded.whole_views.append(UserViews(part.module, part.split, part.sharded.full_shapes()))


_SPLIT = frozenset([Role.SPLIT_LAYER, Role.GATHERED_OUTPUT])


def find_output_logits(
    model: nn.Module,
    computed: Iterable[nn.Module],
    plan: Plan,
    mesh: Mesh,
    *,
    blocks: list[nn.Module],
    gathered: list[list[nn.Module]],
    split_outputs: Mapping[nn.Module, int],
    parameters: int | None = None,
) -> OutputLogits:
    """Makes the linear layers outside of `model`'s blocks return logits as ``plan.logits`` says.

    Args:
        model: on the meta device, with full parameters.
        computed: all modules that this rank computes.
        blocks: the model's; the model itself if it has none.
        gathered: under ZeRO 3, the modules whose parameters are gathered only for their own forward; else empty.
        split_outputs: layers that are split over the tensor-parallel ranks and return full outputs, each with its
            number of features on all ranks together.
        parameters: the elements of the model's parameters; None to count them.
    """
    if plan.logits == "whole":
        return OutputLogits()
    within = {inner for block in blocks if block is not model or plan.compile for inner in block.modules()}
    outside = set(computed) - within
    gathered_separately = {inner for unit in gathered for module in unit for inner in module.modules()}
    layers = []
    for name, module in model.named_modules():
        transposed = is_transposed(module)
        own = own_parameters(module).keys()
        if module not in outside or not (transposed or runs_forward_of(module, nn.Linear)) or "weight" not in own:
            continue
        roles = roles_of(module) & TENSOR_PARALLEL_ROLES
        is_split = module in split_outputs and roles == _SPLIT
        classes = split_outputs[module] if is_split else module.weight.shape[1 if transposed else 0]  # type: ignore[union-attr, index]
        layer = OutputLayer(name or type(module).__name__, module, transposed, int(classes))
        if is_split:
            layer.group = mesh.group("tp")
        elif roles:
            layer.refused = "tensor parallelism splits it in another way than along its outputs"
        if module in gathered_separately:
            layer.refused = "shard_units has its parameters gathered for its own forward alone"
        elif plan.offloads_parameters:
            layer.refused = "its parameters are offloaded, and there for its own forward alone"
        elif plan.pp > 1 and find_schedule(plan.pp_schedule).splits_backward:
            layer.refused = f"pp_schedule={plan.pp_schedule!r} computes gradients of inputs and of parameters apart"
        layers.append(layer)
    # A loss that computes gradients in forward keeps one as large as the weight for each micro-batch under way. So at
    # most one may be under way.
    at_once = plan.pp == 1 or plan.pp_schedule == "1f1b"
    if parameters is None:
        parameters = sum(parameter.numel() for parameter in model.parameters())
    return OutputLogits(plan.logits, layers, _state_bytes(parameters // plan.tp, plan), at_once=at_once)


def _state_bytes(parameters: int, plan: Plan) -> int:
    """Bytes of weights, gradients and two optimizer states on a rank in fp32; the same number on all ranks."""
    level, ranks = int(plan.zero), plan.shard_size
    over = [ranks if level >= needed else 1 for needed in (3, 2, 1, 1)]
    return sum(4 * parameters // shards for shards in over)


PASSES: tuple[Callable[[Part, PassContext], None], ...] = (
    batch_norm,
    precision,
    tensor_parallel,
    expert_parallel,
    context_parallel,
    tiled_logits,
    tiles,
    recompute,
    compilation,
    offloaded_activations,
    buffers,
    data_parallel,
    full_parameters,
)
"""All passes, in the order in which they are applied. A pass that the plan does not ask for does nothing.

What runs around what in a module's forward is decided by :class:`tensorshard.model.forwards.Role`, not by this order.
"""
