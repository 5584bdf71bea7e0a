"""FSDP2's collectives, and its state.

`AllGather`, `ReduceScatter`: what the arguments of ``FSDPModule.set_custom_all_gather`` and
``set_custom_reduce_scatter``, which are public, derive from.

Why: on Gloo, all-gathers and reduce-scatters built from sends and receives are several times as fast.

Checked: torch 2.11 and 2.13.

Public way: none; the methods are public and the classes are not.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

__all__ = [
    "AllGather",
    "ReduceScatter",
    "forget_fully_shard",
    "parameter_groups",
    "reset_iteration",
    "unsharded_parameter",
]


def parameter_groups(model: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that travel together, of all modules in `model`.

    Why: a group reduces the gradients that this rank has, where all ranks have to reduce the same.

    Checked: torch 2.11 and 2.13; a module may have several groups from 2.13 on.

    Public way: ``FSDPModule.set_reduce_scatter_unused_params``, from torch 2.13 on, which does not tell who has none.
    """
    groups: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups.update((id(group), group) for group in _groups_of(module._get_fsdp_state()))
    return list(groups.values())


def unsharded_parameter(fsdp_param: Any) -> torch.Tensor | None:
    """The full parameter that autograd sees, of one of the ``fsdp_params`` of a group; None if never gathered yet.

    Why: its gradient is filled with zeros where a rank has none.

    Checked: torch 2.11 and 2.13.

    Public way: the module's own parameter, between a forward and its backward.
    """
    return getattr(fsdp_param, "_unsharded_param", None)


def reset_iteration(root: nn.Module) -> None:
    """Makes a model ready for the next forward after an exception in a forward or a backward; gradients are dropped.

    Why: FSDP2 would think that the backward was still going on, and never reduce another gradient.

    Checked: torch 2.11 and 2.13.

    Public way: ``FSDPModule.reset_iter_state()``, from torch 2.13 on, which keeps gradients that no rank reduced yet.
    """
    assert isinstance(root, FSDPModule)
    state: Any = root._get_fsdp_state()
    if state._is_root is None:  # never called yet
        return
    for group in parameter_groups(root):
        for fsdp_param in group.fsdp_params:
            fsdp_param.unsharded_accumulated_grad = None
            full = unsharded_parameter(fsdp_param)
            if full is not None:
                full.grad = None
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state._comm_ctx.all_gather_state = None
    state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        for group in _groups_of(each):
            result, group._all_gather_result = group._all_gather_result, None
            if result is not None and isinstance(result.all_gather_work, dist.Work):
                result.all_gather_work.wait()
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def forget_fully_shard(module: nn.Module) -> None:
    """Undoes what ``fully_shard`` keeps of `module` elsewhere; its class and attributes are the former ones again.

    Why: a module whose plan is refused is the user's again, and can be sharded another time.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    _module_state_mapping.pop(module, None)


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
