"""State of models with split parameters: whole tensors to save, shards to load; and what DDP is to leave alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tensorshard.distributed import groups, primitives
from tensorshard.distributed.marks import get_mark, get_parallel_dim, register_parallel_dim
from tensorshard.distributed.sharding import distribute_like, normalize_dim, shard_range, shard_sizes

__all__ = [
    "collect_state_dict",
    "get_parallel_dim",
    "register_ddp_parameters_to_ignore",
    "register_parallel_dim",
    "relocate_state_dict",
    "slice",
]

Stateful = nn.Module | torch.optim.Optimizer
_Path = tuple[Any, ...]
# On parameters whose gradients are averaged over the data-parallel group already.
_AVERAGED = "_tensorshard_averaged"
_Tree = TypeVar("_Tree")


@dataclass(frozen=True)
class _Description:
    """Stands for a tensor that is on its way from another rank."""

    shape: torch.Size
    dtype: torch.dtype


def slice(
    tensor: torch.Tensor, num_partitions: int, dim: int | None = None, contiguous: bool = False
) -> tuple[torch.Tensor, ...]:
    """Cuts `tensor` along `dim` (the last, if None) as parameters are cut over `num_partitions` ranks.

    Args:
        num_partitions: how many parts; always that many, though the last may be shorter, or empty.
        contiguous: whether the parts are to be contiguous; otherwise they are views.

    Raises:
        ValueError: `num_partitions` is below 1.
        IndexError: the tensor has no dimension `dim`.
    """
    if num_partitions < 1:
        raise ValueError(f"num_partitions={num_partitions} was given: use at least 1")
    dim = normalize_dim(-1 if dim is None else dim, tensor.ndim)
    parts = tensor.split(shard_sizes(tensor.size(dim), num_partitions), dim)
    return tuple(part.contiguous() for part in parts) if contiguous else tuple(parts)


@torch.no_grad()
def collect_state_dict(
    model: Stateful,
    state_dict: dict[str, Any] | None = None,
    prefix: str = "",
    *,
    rank0_only: bool = True,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The state with every split tensor whole, as the model that is not parallel would give it.

    Every rank calls this. Tensors are put together one at a time: no rank holds more than one whole tensor besides
    those it is to return.

    Args:
        model: a module, or an optimizer of its parameters.
        state_dict: ``model.state_dict()``, which is taken if None.
        prefix: put before every name in the result.
        rank0_only: return the state on the first rank of each model-parallel group alone, and {} on the others.
        device: where the result is to be.

    Returns:
        A dict of the structure of `state_dict`, of plain tensors; tensors that were tied still are.
    """
    state_dict = model.state_dict() if state_dict is None else state_dict
    keep = not rank0_only or _is_first_rank()
    marked = _marked_parameters(model)
    known: dict[tuple[Any, ...], torch.Tensor] = {}

    def collect(path: _Path, tensor: torch.Tensor) -> torch.Tensor | None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        identity = (local.device, local.data_ptr(), local.shape, local.stride(), local.dtype)
        if keep and identity in known and local.numel():
            return known[identity]
        if isinstance(tensor, DTensor):
            whole = tensor.full_tensor()
        elif path[0] in marked:
            whole = _gather_marked(tensor, marked[path[0]])
        else:
            whole = tensor
        if not keep:
            return None
        return known.setdefault(identity, whole.detach().to(device))

    collected = _map_tensors(state_dict, collect)
    return {prefix + name: value for name, value in collected.items()} if keep else {}


@torch.no_grad()
def relocate_state_dict(
    model: Stateful, state_dict: dict[str, Any] | None, prefix: str = ""
) -> dict[str, Any]:
    """Turns a state of whole tensors into what this rank's ``model.load_state_dict`` takes.

    Every rank calls this. Either all ranks pass the state, and no tensor travels; or the first rank of each
    model-parallel group passes it, the others None or {}, and it is sent one tensor at a time.

    Args:
        model: a module with split parameters, or an optimizer of them.
        state_dict: what :func:`collect_state_dict` returned, or the state of the model that is not parallel.
        prefix: put before every name in the result.

    Returns:
        A dict of the structure of `state_dict`, in which split tensors are DTensors. The input is left as it is.

    Raises:
        ValueError: a tensor is not of the shape that the model has, or no rank passed a state.
    """
    group = groups.get_group() if groups.is_initialized() else groups.world_group()
    device = _communication_device(group)
    holders = primitives.exchange_sizes(int(bool(state_dict)), group, device)
    if not holders[0]:
        raise ValueError(
            "the first rank of the group passed no state: pass it on all ranks, or on that one and None on the others"
        )
    fetch: Callable[[Any], torch.Tensor] = lambda tensor: tensor  # noqa: E731
    if not all(holders):
        state_dict, fetch = _announce_state(state_dict, group, device)
    assert state_dict is not None  # every rank has at least the descriptions by now
    references = _reference_tensors(model)
    marked = _marked_parameters(model)

    def relocate(path: _Path, tensor: Any) -> torch.Tensor:
        whole = fetch(tensor)
        if path[0] in marked:
            return _slice_marked(whole, marked[path[0]])
        reference = references.get(path if path in references else path[:-1])
        scalar = len(path) > 1 and whole.shape != getattr(reference, "shape", None)  # a step count, say
        if reference is None or isinstance(whole, DTensor) or scalar:
            return whole
        try:
            return distribute_like(whole, reference)
        except ValueError as error:
            raise ValueError(f"{path[-1]}: {error}") from error

    relocated = _map_tensors(state_dict, relocate)
    return {prefix + name: value for name, value in relocated.items()}


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Has ``DistributedDataParallel`` leave the split parameters of `module` alone. Call it before wrapping.

    Where model-parallel groups are smaller than the world, other groups hold the same shards and see other samples:
    then the shards of the first group are copied to them now, and gradients of split parameters are averaged over the
    groups at the end of every backward.

    Returns:
        Their names.

    Raises:
        ValueError: a parameter is split over a group that is neither the world nor one of the model-parallel groups.
    """
    split = {
        (module_name, name): parameter
        for module_name, owner in module.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor) or get_mark(parameter) is not None
    }
    names = [f"{module_name}.{name}" if module_name else name for module_name, name in split]
    for name, parameter in zip(names, split.values(), strict=True):
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() < dist.get_world_size():
            _synchronize_replicas(name, parameter)
    # DDP spells the name of a parameter of the outermost module with a dot in front.
    spellings = names + [f".{name}" for module_name, name in split if not module_name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, spellings)
    return names


def _synchronize_replicas(name: str, parameter: DTensor) -> None:
    """Makes the shards that other model-parallel groups hold equal, and keeps them so."""
    if not groups.is_initialized() or parameter.device_mesh.get_group() is not groups.get_group():
        raise ValueError(
            f"{name} is split over {parameter.device_mesh.size()} of {dist.get_world_size()} ranks, which are not a "
            f"group of tensorshard.distributed.init_process_group: it is not known who holds the same shard"
        )
    if hasattr(parameter, _AVERAGED):
        return
    group = groups.get_data_parallel_group()
    dist.broadcast(parameter.to_local().detach(), group_src=0, group=group)

    def average(parameter: torch.Tensor) -> None:
        local = parameter.grad.to_local()  # type: ignore[union-attr]
        primitives.all_reduce(local, group)
        local.div_(group.size())

    parameter.register_post_accumulate_grad_hook(average)
    setattr(parameter, _AVERAGED, True)


def _is_first_rank() -> bool:
    """Whether this rank is the first of its model-parallel group, or of the world where there are no groups."""
    return groups.get_rank() == 0 if groups.is_initialized() else dist.get_rank() == 0


def _communication_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors must be to travel over `group`."""
    return torch.device("cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu")


def _map_tensors(tree: _Tree, function: Callable[[_Path, Any], Any], path: _Path = ()) -> _Tree:
    """`tree` of dicts, lists and tuples with `function(path, tensor)` in place of each tensor, in order."""
    if isinstance(tree, (torch.Tensor, _Description)):
        return function(path, tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(value, function, (*path, key)) for key, value in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, (list, tuple)):
        items = [_map_tensors(value, function, (*path, index)) for index, value in enumerate(tree)]
        return type(tree)(items)
    return tree


def _announce_state(
    state_dict: dict[str, Any] | None, group: dist.ProcessGroup, device: torch.device
) -> tuple[dict[str, Any], Callable[[Any], torch.Tensor]]:
    """Tells all ranks what the first one holds.

    Returns:
        Its state, with descriptions for tensors on the other ranks; and what to call on each tensor or description, on
        all ranks in order, to have it.
    """
    skeleton = [_map_tensors(state_dict, lambda _, tensor: _Description(tensor.shape, tensor.dtype))]
    dist.broadcast_object_list(skeleton, group_src=0, group=group, device=device)

    def fetch(tensor: torch.Tensor | _Description) -> torch.Tensor:
        if isinstance(tensor, torch.Tensor):
            sent = tensor.detach().to(device).contiguous()
        else:
            sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(sent, group_src=0, group=group)
        return sent

    first = state_dict if group.rank() == 0 else skeleton[0]
    assert first is not None  # broadcast from a rank that has it
    return first, fetch


def _reference_tensors(model: Stateful) -> dict[_Path, DTensor]:
    """The DTensors after which loaded tensors are cut: by name; for an optimizer, by place of the parameter."""
    if isinstance(model, nn.Module):
        return {(name,): value for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    parameters = [parameter for group in model.param_groups for parameter in group["params"]]
    return {
        ("state", i): parameter for i, parameter in enumerate(parameters) if isinstance(parameter, DTensor)
    }


def _marked_parameters(model: Stateful) -> dict[str, torch.Tensor]:
    """Plain parameters that a layer of somebody's own has marked as split."""
    if not isinstance(model, nn.Module):
        return {}
    return {
        n: p for n, p in model.named_parameters() if not isinstance(p, DTensor) and get_mark(p) is not None
    }


def _gather_marked(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    mark = get_mark(parameter)
    assert mark is not None
    group = mark.group or groups.get_group()
    dim = normalize_dim(mark.dim, tensor.ndim)
    return primitives.gather_dim(
        tensor, dim, primitives.exchange_sizes(tensor.size(dim), group, tensor.device), group
    )


def _slice_marked(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    mark = get_mark(parameter)
    assert mark is not None
    group = mark.group or groups.get_group()
    dim = normalize_dim(mark.dim, whole.ndim)
    return whole.narrow(dim, *shard_range(whole.size(dim), group.size(), group.rank())).clone()
