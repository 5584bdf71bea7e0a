"""Fused updates of DTensors: the kernel is given the shards themselves.

DTensor compares the placements of all tensors of such a call first. That takes milliseconds in every step, and seconds
in the first one of a model with hundreds of parameters. An update works on each element by itself, so that shards of
equal placement need none of it.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorshard.torch_private.dispatch import TorchDispatchMode, innermost_dispatch_mode
from tensorshard.torch_private.dtensor import shard_of
from tensorshard.torch_private.operators import FUSED_UPDATES
from tensorshard.torch_private.pytree import tree_map


def fused_updates_of_shards(optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Inside, `optimizer` updates the shards of its DTensors where its update is fused."""
    groups = optimizer.param_groups
    is_wanted = any(group.get("fused") and any(isinstance(p, DTensor) for p in group["params"]) for group in groups)
    return _FusedUpdates() if is_wanted else nullcontext()


def hook_outside_update_mode(work: Callable[[], object]) -> Callable[..., None]:
    """`work` as a hook of an optimizer's step. It is not part of the update: its own operations, which are collectives
    of many small messages, do not go through :func:`fused_updates_of_shards`."""

    def hook(*_: Any) -> None:
        mode = innermost_dispatch_mode()
        if not isinstance(mode, _FusedUpdates):
            work()
            return
        mode.__exit__(None, None, None)
        try:
            work()
        finally:
            mode.__enter__()

    return hook


class _FusedUpdates(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUSED_UPDATES and _are_cut_alike(args):
            args, kwargs = tree_map(shard_of, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _are_cut_alike(lists: Iterable[Any]) -> bool:
    """Whether there are DTensors, each weight is cut as its gradient and its states are, and none is a partial sum."""
    every = [[leaf for leaf in one if isinstance(leaf, DTensor)] for one in lists if isinstance(one, list | tuple)]
    cuts = [[(one.device_mesh, one.placements) for one in tensors] for tensors in every if tensors]
    if not cuts or any(placement.is_partial() for _, placements in cuts[0] for placement in placements):
        return False
    return all(cut == cuts[0] for cut in cuts)
