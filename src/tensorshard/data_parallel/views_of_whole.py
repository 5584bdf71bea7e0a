"""Views of a gathered parameter: what is written into them reaches this rank's shard."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import local_shard
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.pytree import tree_map
from tensorshard.torch_private.tensors import storage_address


class ViewOfWhole(torch.Tensor):
    """A view of a whole tensor that was gathered from shards. Writes are taken over to the shards."""

    _of: tuple[DTensor, torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], ViewOfWhole) else None
        with without_torch_functions_of_tensors():
            plain_args, plain_kwargs = tree_map(_plain, (args, kwargs or {}))
            result = func(*plain_args, **plain_kwargs)
            if target is None:
                return result
            name: str = getattr(func, "__name__", "")
            if is_write(name):
                take_over(*target._of)
                return target if isinstance(result, torch.Tensor) and result is plain_args[0] else result
            return as_views(result, *target._of)


def is_write(name: str) -> bool:
    """Whether the function with this name writes into its first argument."""
    if name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__index__", "__int__", "__iter__", "__invert__")
    return name.endswith("_") and name != "requires_grad_"


def _plain(leaf: Any) -> Any:
    return leaf.as_subclass(torch.Tensor) if isinstance(leaf, ViewOfWhole) else leaf


def as_views(result: Any, target: DTensor, full: torch.Tensor) -> Any:
    """Those tensors of `result` that are views of `full`, which was gathered from `target`, take writes over to it."""

    def view(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not _share_memory(leaf, full):
            return leaf
        made = leaf.as_subclass(ViewOfWhole)
        made._of = (target, full)
        return made

    if isinstance(result, tuple | list):
        return type(result)(map(view, result)) if type(result) in (tuple, list) else result
    return view(result)


def take_over(target: DTensor, full: torch.Tensor) -> None:
    """Copies this rank's part of `full` into the shard."""
    with torch.no_grad(), without_torch_functions_of_tensors():
        local = target.to_local()
        local.copy_(local_shard(full, target.device_mesh, target.placements).view(local.shape))


def view_of(target: DTensor, gather: Callable[[], torch.Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func(target, ...)`` gives, which only views memory: that of the shard if possible, else of the whole."""
    with without_torch_functions_of_tensors():
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, ValueError, IndexError, AssertionError):
            result = None
        parts = result if isinstance(result, tuple | list) else [result]
        if all(isinstance(part, DTensor) and _views_shard(part, target) for part in parts):
            return result
        full = gather()
        args, kwargs = tree_map(lambda leaf: full if leaf is target else leaf, (args, kwargs))
        return as_views(func(*args, **kwargs), target, full)


def _views_shard(part: DTensor, target: DTensor) -> bool:
    return part.numel() == 0 or _share_memory(part.to_local(), target.to_local())


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_address(one.untyped_storage()) == storage_address(other.untyped_storage())
