"""Whether torch's ``DistributedDataParallel`` will average a gradient that ranks of a group are to add up."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.sharded_tensors import is_split
from tensorshard.torch_private.autograd import are_saved_tensors_hooked, is_in_backward
from tensorshard.torch_private.ddp import active_ddp_module


def ranks_averaged_by_ddp(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> int:
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
    module = active_ddp_module()
    if module is not None:
        averaged = set(dist.get_process_group_ranks(module.process_group))
        return len(averaged.intersection(dist.get_process_group_ranks(group)))
    # The other kind of checkpoint saves what it computes again through such a hook, and keeps the first graph.
    if is_in_backward() and not are_saved_tensors_hooked():
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
