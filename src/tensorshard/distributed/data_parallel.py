"""Split parameters inside a model that torch's ``DistributedDataParallel`` replicates."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tensorshard.distributed import groups, primitives
from tensorshard.distributed.parts import is_split, own_group
from tensorshard.distributed.sharding import to_local

# On parameters whose gradients are averaged over the data-parallel group already.
_AVERAGED = "_tensorshard_averaged"


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Has ``DistributedDataParallel`` leave the split parameters of `module` alone. Call it before wrapping.

    (Wrapping calls it itself where it was forgotten, for parameters split over the model-parallel group.)

    Where model-parallel groups are smaller than the world, other groups hold the same shards and see other
    samples: then the shards of the first group are copied to them now, and gradients of split parameters are
    averaged over the groups at the end of every backward.

    Returns:
        Their names.

    Raises:
        ValueError: a parameter is split over a group that is neither the world nor one of the model-parallel
            groups.
    """
    split = {
        (module_name, name): parameter
        for module_name, owner in module.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if is_split(parameter)
    }
    names = [f"{module_name}.{name}" if module_name else name for module_name, name in split]
    for name, parameter in zip(names, split.values(), strict=True):
        _synchronize_replicas(name, parameter)
    # DDP spells the name of a parameter of the outermost module with a dot in front.
    spellings = names + [f".{name}" for module_name, name in split if not module_name]
    others = [name for name in _ignored(module) if name not in spellings]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, others + spellings)
    return names


def leaving_split_parameters_alone(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of ``DistributedDataParallel``, which registers split parameters that nobody has registered.

    Only those split over a model-parallel group of :func:`tensorshard.distributed.init_process_group`: what to make
    of other DTensors, torch itself knows.
    """

    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, nn.Module):
            known = _ignored(module)
            unknown = (p for name, p in module.named_parameters() if name not in known)
            if any(is_split(p) and _is_split_over_ours(p) for p in unknown):
                register_ddp_parameters_to_ignore(module)
        original(self, module, *args, **kwargs)

    return __init__


def _ignored(module: nn.Module) -> list[str]:
    """What ``DistributedDataParallel`` has been told to leave alone, by anybody."""
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def _is_split_over_ours(parameter: torch.Tensor) -> bool:
    several_axes = isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1
    return not several_axes and own_group(parameter) is groups.get_group()


def ranks_to_add_up(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> int:
    """How many ranks of `group` have gradients that are to be added and that ``DistributedDataParallel`` averages.

    That is so inside its forward, where dimension 0 is that of samples and the ranks have different ones: what is
    computed from them gets, in backward, this rank's part of the gradient.

    Args:
        tensor: what is gathered or scattered. What is computed from split parameters alone holds no samples, and DDP
            averages none of its gradients.
        dim: as it was given: 0 is the dimension of samples; -1 is that of features, even where there is only one.
        group: over whose ranks.

    Returns:
        1 where there is nothing to make up for.

    Raises:
        RuntimeError: a reentrant ``torch.utils.checkpoint`` is computing again during backward, where it is not
            known whether it was DDP that called.
    """
    along_samples = dim == 0 or (tensor.ndim > 1 and dim == -tensor.ndim)
    if not along_samples or not torch.is_grad_enabled() or not tensor.requires_grad or _is_of_split_parameters(tensor):
        return 1
    module = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if module is not None:
        averaged = set(dist.get_process_group_ranks(module.process_group))
        return len(averaged.intersection(dist.get_process_group_ranks(group)))
    in_backward = torch._C._current_graph_task_id() != -1
    # The other kind of checkpoint saves what it computes again through such a hook, and keeps the first graph.
    if in_backward and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        raise RuntimeError(
            "a gather or scatter along dimension 0 is being computed again by torch.utils.checkpoint with "
            "use_reentrant=True, where it cannot be seen whether DistributedDataParallel will average the gradient: "
            "use use_reentrant=False, or say grad_scale=get_group_size() (1 / get_group_size() for scatter) under "
            "DistributedDataParallel, grad_scale=1 elsewhere"
        )
    return 1


def _is_of_split_parameters(tensor: torch.Tensor) -> bool:
    """Whether nothing but split parameters is behind `tensor`; an input of the model counts as one, as DDP does.

    Looks until the first other parameter, which is few steps away where there is one.
    """
    if tensor.is_leaf:
        return is_split(tensor) or not isinstance(tensor, nn.Parameter)
    pending, seen = [tensor.grad_fn], {tensor.grad_fn}
    while pending:
        node: Any = pending.pop()
        before = {following for following, _ in node.next_functions if following is not None}
        if not before and not (hasattr(node, "variable") and is_split(node.variable)):
            return False
        pending += before - seen
        seen |= before
    return True


def _synchronize_replicas(name: str, parameter: torch.Tensor) -> None:
    """Makes the shards that other model-parallel groups hold equal, and keeps them so."""
    own = own_group(parameter)
    if own.size() == dist.get_world_size() or hasattr(parameter, _AVERAGED):
        return
    if not groups.is_initialized() or own is not groups.get_group():
        raise ValueError(
            f"{name} is split over {own.size()} of {dist.get_world_size()} ranks, which are not a group of "
            "tensorshard.distributed.init_process_group: it is not known who holds the same shard"
        )
    group = groups.get_data_parallel_group()
    dist.broadcast(to_local(parameter).detach(), group_src=0, group=group)

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None  # it has just been accumulated
        local = to_local(parameter.grad)
        primitives.all_reduce(local, group)
        local.div_(group.size())

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(average)
    setattr(parameter, _AVERAGED, True)
