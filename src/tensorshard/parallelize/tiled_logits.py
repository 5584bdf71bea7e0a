"""Output layers that return logits which are not computed: finds them in a model, or in a pipeline's last stage."""

from collections.abc import Iterable, Mapping

from torch import nn

from tensorshard.loss.logits.output_layers import OutputLayer, OutputLogits
from tensorshard.model.forwards import TENSOR_PARALLEL_ROLES, Role, roles_of, runs_forward_of
from tensorshard.model.special_layers import is_transposed
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.schedules import find_schedule
from tensorshard.torch_private.modules import own_parameters

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
    level, ranks = int(plan.zero), plan.dp_shard
    over = [ranks if level >= needed else 1 for needed in (3, 2, 1, 1)]
    return sum(4 * parameters // shards for shards in over)
