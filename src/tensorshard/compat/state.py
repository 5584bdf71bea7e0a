"""The state of models with split parameters: full tensors to save, shards to load; and marks, by TorchShard's names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tensorshard.comm import groups, primitives
from tensorshard.comm.collectives import on_the_wire
from tensorshard.comm.marks import (
    ParallelMark,
    get_parallel_dim,
    register_parallel_attribute,
    register_parallel_dim,
)
from tensorshard.comm.sharded_tensors import check_tensor, gather_full, own_part, own_shard
from tensorshard.comm.sharding import normalize_dim, shard_sizes
from tensorshard.common.words import kind_of
from tensorshard.distributed.ddp import register_ddp_parameters_to_ignore
from tensorshard.distributed.optimizer_state import complete_states
from tensorshard.layers.parallel_module import layout_of

__all__ = [
    "collect_state_dict",
    "get_parallel_dim",
    "register_ddp_parameters_to_ignore",
    "register_parallel_attribute",
    "register_parallel_dim",
    "relocate_state_dict",
    "sharded_state_dict",
    "slice",
]

Stateful = nn.Module | torch.optim.Optimizer
_Path = tuple[Any, ...]


@dataclass(frozen=True)
class _Description:
    """Stands for a tensor that another rank will send."""

    shape: torch.Size
    dtype: torch.dtype


def slice(
    tensor: torch.Tensor, num_partitions: int, dim: int | None = None, contiguous: bool = False
) -> tuple[torch.Tensor, ...]:
    """Cuts `tensor` along `dim` (the last, if None) in the way that parameters are cut over `num_partitions` ranks.

    Args:
        num_partitions: how many parts to return. The last ones may be shorter, or empty.
        contiguous: whether the parts are made contiguous; otherwise they are views.

    Raises:
        ValueError: `num_partitions` is below 1.
        IndexError: the tensor has no dimension `dim`.

    Examples:
        >>> [part.shape[0] for part in ts.slice(torch.randn(5, 4), 2, dim=0)]
        [3, 2]
    """
    check_tensor(tensor, "slice")
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
    rank0_only: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """The state dict with full tensors, as the model without parallel layers would give it.

    Every rank calls this. Tensors are gathered one at a time: no rank holds more than one full tensor
    besides those that it returns. For a large model, use ``rank0_only=True, device="cpu"``.

    Args:
        model: a module, or an optimizer of its parameters. A ``ZeroRedundancyOptimizer`` is consolidated, on the
            first rank of its group if `rank0_only`.
        state_dict: what ``model.state_dict()`` returned; None to call it here. If a module's is given, as in
            TorchShard's scripts, ``optimizer.state_dict()`` of its optimizers is full too, on the first rank of each
            group, until their next step.
        prefix: put before every name in the result.
        rank0_only: whether only the first rank of each model-parallel group returns the state. The others return {},
            and never hold more than one full tensor.
        device: where the result is stored; None for where the tensors are.

    Returns:
        A dict of the structure of `state_dict`, of plain tensors. Tied tensors stay tied.

    Raises:
        TypeError: `model` is neither a module nor an optimizer.

    Examples:
        >>> ts.distributed.init_process_group()
        >>> layer = ts.nn.ParallelLinear(16, 4, dim=1)
        >>> state = ts.collect_state_dict(layer)
        >>> state["weight"].shape
        torch.Size([4, 16])
        >>> layer.load_state_dict(ts.relocate_state_dict(layer, state))
        <All keys matched successfully>
    """
    _check_stateful(model, "collect_state_dict")
    keep = not rank0_only or _is_first_rank()
    if isinstance(model, nn.Module) and state_dict is not None:
        complete_states(model)
    consolidated = state_dict is None and hasattr(model, "consolidate_state_dict")  # torch's ZeroRedundancyOptimizer
    if consolidated:
        keep = not rank0_only or model.rank == 0  # type: ignore[assignment, union-attr]
        state_dict = _consolidate(model, keep)
    state_dict = model.state_dict() if state_dict is None else state_dict
    layouts, held = ({}, {}) if consolidated else (_layouts(model), _tensors_held(model))
    originals = _original_names(model)
    by_row = getattr(model, "row_states", ())  # of an optimizer; they are split as the parameter is
    done: dict[_Path, torch.Tensor | None] = {}

    def collect(path: _Path, tensor: torch.Tensor) -> torch.Tensor | None:
        original = (originals.get(path[0], path[0]), *path[1:])
        if original not in done:
            key = path if isinstance(model, nn.Module) else path[:-1]
            if len(path) > 1 and key in held:  # on the first rank, complete_states may have made it full already
                tensor = own_part(tensor, held[key], str(path[-1]))
                tensor = tensor.to(held[key].device) if tensor.ndim else tensor
            cut = len(path) == 1 or path[-1] in by_row or (key in held and tensor.shape == held[key].shape)
            full = gather_full(tensor, layouts.get(key) if cut else None).detach()
            done[original] = full.to(full.device if device is None else device) if keep else None
        return done[original]

    collected = _map_tensors(state_dict, collect)
    return {prefix + name: value for name, value in collected.items()} if keep else {}


@torch.no_grad()
def relocate_state_dict(model: Stateful, state_dict: dict[str, Any] | None, prefix: str = "") -> dict[str, Any]:
    """Cuts a state dict of full tensors to what this rank's ``model.load_state_dict`` takes.

    Every rank calls this. Either all ranks pass the state, and nothing is sent. Or the first rank of each
    model-parallel group passes it, and the others pass None or {}; then it is sent one tensor at a time.

    Args:
        model: a module with split parameters, or an optimizer of them.
        state_dict: what :func:`collect_state_dict` returned, or the state dict of the model without parallel layers.
        prefix: put before every name in the result.

    Returns:
        A dict of the structure of `state_dict`, in which split tensors are this rank's shards. The input is not
        changed.

    Raises:
        ValueError: a tensor has another shape than in the model, or no rank passed a state.

    Examples:
        >>> ts.distributed.init_process_group()
        >>> layer = ts.nn.ParallelLinear(16, 4, dim=1)
        >>> state = torch.nn.Linear(16, 4).state_dict()
        >>> layer.load_state_dict(ts.relocate_state_dict(layer, state))
        <All keys matched successfully>
    """
    _check_stateful(model, "relocate_state_dict")
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
    layouts, held = _layouts(model), _tensors_held(model)
    by_row = getattr(model, "row_states", ())

    def relocate(path: _Path, tensor: Any) -> torch.Tensor:
        full = fetch(tensor)
        key = path if isinstance(model, nn.Module) else path[:-1]
        layout, like = layouts.get(key), held.get(key)
        if like is None or (layout is None and not isinstance(like, DTensor)):
            return full
        # Not split like the parameter: a step count, or the scales of 8-bit momenta, which their optimizer cuts itself.
        if len(path) > 1 and (full.ndim != like.ndim or path[-1] in by_row):
            return full
        try:
            return own_shard(full, layout, like)
        except ValueError as error:
            name = path[0] if len(path) == 1 else f"{path[-1]} of parameter {path[1]}"
            raise ValueError(f"{name}: {error}") from error

    relocated = _map_tensors(state_dict, relocate)
    return {prefix + name: value for name, value in relocated.items()}


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict, in which split tensors are DTensors that share the memory of the model's shards.

    ``torch.distributed.checkpoint`` saves it, and loads it in place, on any number of ranks. The model's
    ``load_state_dict`` takes it too.

    Raises:
        ValueError: a parameter of a parallel layer is a DTensor already, as under FSDP2.

    Examples:
        >>> ts.distributed.init_process_group()
        >>> layer = ts.nn.ParallelLinear(16, 4, dim=1)
        >>> ts.sharded_state_dict(layer)["weight"].shape
        torch.Size([4, 16])
    """
    state_dict, layouts = model.state_dict(), _layouts(model)
    for path, layout in layouts.items():
        (name,) = path
        shard = state_dict.get(name)
        if not isinstance(shard, torch.Tensor):
            continue
        if isinstance(shard, DTensor):
            raise ValueError(
                f"{name} is a DTensor {tuple(shard.placements)} already: collect_state_dict puts it together"
            )
        mesh = groups.resolve_mesh(layout.group)
        if layout.dim is None:
            state_dict[name] = DTensor.from_local(shard, mesh, [Replicate()], run_check=False)
            continue
        shape = list(shard.shape)
        shape[layout.dim] = (
            layout.size
            if layout.size is not None
            else sum(primitives.exchange_sizes(shape[layout.dim], mesh.get_group(), shard.device))
        )
        stride = torch.empty(shape, device="meta").stride()
        state_dict[name] = DTensor.from_local(
            shard, mesh, [Shard(layout.dim)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    return state_dict


def _check_stateful(model: object, call: str) -> None:
    if not (hasattr(model, "state_dict") and hasattr(model, "load_state_dict")):
        raise TypeError(f"{call} was given {kind_of(model)}, where a module or an optimizer was expected")


def _consolidate(optimizer: Any, keep: bool) -> dict[str, Any]:
    """The full state of a ``ZeroRedundancyOptimizer``, on the ranks with `keep`; {} on the others."""
    flag = torch.tensor([int(keep)], device=_communication_device(optimizer.process_group))
    keepers = primitives.gather_flat(flag, optimizer.process_group).flatten().tolist()
    state: dict[str, Any] = {}
    for rank, keeps in enumerate(keepers):
        if keeps:
            optimizer.consolidate_state_dict(to=rank)
            state = optimizer.state_dict() if rank == optimizer.rank else state
    return state


def _is_first_rank() -> bool:
    """Whether this rank is the first of its model-parallel group, or of the world if there are no groups."""
    return groups.get_rank() == 0 if groups.is_initialized() else dist.get_rank() == 0


def _communication_device(group: dist.ProcessGroup) -> torch.device:
    """The device that tensors must be on to be sent over `group`."""
    return torch.device("cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu")


def _map_tensors(tree: Any, function: Callable[[_Path, Any], Any], path: _Path = ()) -> Any:
    """`tree` of dicts, lists and tuples with `function(path, tensor)` in place of each tensor, in order."""
    if isinstance(tree, (torch.Tensor, _Description)):
        return function(path, tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(value, function, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [_map_tensors(value, function, (*path, index)) for index, value in enumerate(tree)]
        return type(tree)(items)
    return tree


def _announce_state(
    state_dict: dict[str, Any] | None, group: dist.ProcessGroup, device: torch.device
) -> tuple[dict[str, Any], Callable[[Any], torch.Tensor]]:
    """Tells all ranks what the first one has.

    Returns:
        The state, with descriptions in place of tensors on all ranks but the first; and a function that returns the
        tensor of a description, which all ranks call on each tensor or description in the same order.
    """
    skeleton = [_map_tensors(state_dict, lambda _, tensor: _Description(tensor.shape, tensor.dtype))]
    dist.broadcast_object_list(skeleton, group_src=0, group=group, device=device)

    def fetch(tensor: torch.Tensor | _Description) -> torch.Tensor:
        if isinstance(tensor, torch.Tensor):
            sent = tensor.detach().to(device).contiguous()
        else:
            sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(on_the_wire(sent), group_src=0, group=group)
        return sent

    first = state_dict if group.rank() == 0 else skeleton[0]
    assert first is not None  # broadcast from a rank that has it
    return first, fetch


def _layouts(model: Stateful) -> dict[_Path, ParallelMark]:
    """How tensors are split, by name; for an optimizer, by the position of the parameter whose states they are."""
    tensors: dict[_Path, torch.Tensor] = {}
    if isinstance(model, nn.Module):
        tensors.update(((name,), p) for name, p in model.named_parameters(remove_duplicate=False))
        tensors.update(((name,), buffer) for name, buffer in model.named_buffers(remove_duplicate=False))
    else:
        tensors = _tensors_held(model)
    layouts = {place: layout_of(tensor) for place, tensor in tensors.items()}
    return {place: layout for place, layout in layouts.items() if layout is not None}


def _tensors_held(model: Stateful) -> dict[_Path, torch.Tensor]:
    """The tensors whose shapes loaded ones must have, by name; for an optimizer, by the position of the parameter."""
    if isinstance(model, nn.Module):
        return {(name,): value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    parameters = [parameter for group in model.param_groups for parameter in group["params"]]
    return {("state", index): parameter for index, parameter in enumerate(parameters)}


def _original_names(model: Stateful) -> dict[str, str]:
    """For every name of a parameter, the first name that the same parameter has."""
    if not isinstance(model, nn.Module):
        return {}
    first: dict[int, str] = {}
    return {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}
