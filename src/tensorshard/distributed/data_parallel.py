"""Split parameters inside a model that torch's ``DistributedDataParallel`` replicates."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tensorshard.distributed import groups, primitives
from tensorshard.distributed.marks import get_mark

# On parameters whose gradients are averaged over the data-parallel group already.
_AVERAGED = "_tensorshard_averaged"


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Has ``DistributedDataParallel`` leave the split parameters of `module` alone. Call it before wrapping.

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
        if isinstance(parameter, DTensor) or get_mark(parameter) is not None
    }
    names = [f"{module_name}.{name}" if module_name else name for module_name, name in split]
    for name, parameter in zip(names, split.values(), strict=True):
        _synchronize_replicas(name, parameter)
    # DDP spells the name of a parameter of the outermost module with a dot in front.
    spellings = names + [f".{name}" for module_name, name in split if not module_name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, spellings)
    return names


def _synchronize_replicas(name: str, parameter: torch.Tensor) -> None:
    """Makes the shards that other model-parallel groups hold equal, and keeps them so."""
    mark = get_mark(parameter)
    if isinstance(parameter, DTensor):
        own = parameter.device_mesh.get_group()
    else:
        own = mark.group if mark is not None and mark.group is not None else groups.get_group()
    if own.size() == dist.get_world_size() or hasattr(parameter, _AVERAGED):
        return
    if not groups.is_initialized() or own is not groups.get_group():
        raise ValueError(
            f"{name} is split over {own.size()} of {dist.get_world_size()} ranks, which are not a group of "
            "tensorshard.distributed.init_process_group: it is not known who holds the same shard"
        )
    group = groups.get_data_parallel_group()
    dist.broadcast(_local(parameter).detach(), group_src=0, group=group)

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None  # it has just been accumulated
        local = _local(parameter.grad)
        primitives.all_reduce(local, group)
        local.div_(group.size())

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(average)
    setattr(parameter, _AVERAGED, True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
