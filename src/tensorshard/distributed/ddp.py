"""Split parameters inside a model that torch's ``DistributedDataParallel`` replicates."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm import groups, primitives
from tensorshard.comm.marks import get_mark
from tensorshard.comm.sharded_tensors import own_group
from tensorshard.torch_private.process_groups import ddp_ignored, set_ddp_ignored

# Attribute of the parameters whose gradients a hook averages over the data-parallel group already.
_AVERAGED = "_tensorshard_averaged"


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Makes ``DistributedDataParallel`` leave the split parameters of `module` alone. Call it before wrapping.

    If you forget it, wrapping calls it, for parameters that are split over the model-parallel group.

    Parameters that every rank holds in full, such as the bias of a layer that splits its input features, are
    averaged as usual. If model-parallel groups are smaller than the world, other groups hold the same shards and see
    other samples. Then the first group's shards are copied to them now, and every backward averages the gradients of
    split parameters over the groups.

    Returns:
        The names of the split parameters.

    Raises:
        ValueError: a parameter is split over a group that is neither the world nor one of the model-parallel
            groups.

    Examples:
        >>> ts.distributed.init_process_group()
        >>> model = torch.nn.Sequential(ts.nn.ParallelLinear(16, 4, dim=1), torch.nn.Linear(4, 4))
        >>> ts.register_ddp_parameters_to_ignore(model)
        ['0.weight', '0.bias']
    """
    split = {
        (module_name, name): parameter
        for module_name, owner in module.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if get_mark(parameter) is not None
    }
    names = [f"{module_name}.{name}" if module_name else name for module_name, name in split]
    for name, parameter in zip(names, split.values(), strict=True):
        _synchronize_replicas(name, parameter)
    # DDP spells the name of a parameter of the outermost module with a dot in front.
    spellings = names + [f".{name}" for module_name, name in split if not module_name]
    others = [name for name in ddp_ignored(module) if name not in spellings]
    set_ddp_ignored(module, others + spellings)
    return names


def leaving_split_parameters_alone(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of ``DistributedDataParallel``: it registers split parameters that nobody has registered.

    Parameters that are split over other groups than those of :func:`tensorshard.distributed.init_process_group` are not
    registered.
    """

    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, nn.Module):
            known = ddp_ignored(module)
            unknown = (p for name, p in module.named_parameters() if name not in known)
            if any(get_mark(p) is not None and own_group(p) is groups.get_group() for p in unknown):
                register_ddp_parameters_to_ignore(module)
        original(self, module, *args, **kwargs)

    return __init__


def _synchronize_replicas(name: str, parameter: torch.Tensor) -> None:
    """Copies the first group's shard to the other model-parallel groups, and averages its gradient from now on."""
    own = own_group(parameter)
    if own.size() == dist.get_world_size() or hasattr(parameter, _AVERAGED):
        return
    if not groups.is_initialized() or own is not groups.get_group():
        raise ValueError(
            f"{name} is split over {own.size()} of {dist.get_world_size()} ranks, which are not a group of "
            "tensorshard.distributed.init_process_group: it is not known who holds the same shard"
        )
    group = groups.get_data_parallel_group()
    dist.broadcast(parameter.detach(), group_src=0, group=group)

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None  # it has just been accumulated
        primitives.all_reduce(parameter.grad, group)
        parameter.grad.div_(group.size())

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(average)
    setattr(parameter, _AVERAGED, True)
