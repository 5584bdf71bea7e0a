"""Whether torch's ``DistributedDataParallel`` will average a gradient that ranks of a group are to add up."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.sharded_tensors import is_split
from tensorshard.torch_private.autograd import are_saved_tensors_hooked, is_in_backward
from tensorshard.torch_private.process_groups import active_ddp_module


def ranks_averaged_by_ddp(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> int:
    """How many ranks of `group` have gradients that are to be added and that ``DistributedDataParallel`` averages.

    Inside DDP's forward, dimension 0 is that of samples, and each rank has different ones. In backward each rank then
    has its own part of the gradient. These parts have to be added, but DDP averages them.

    Args:
        tensor: what is gathered or scattered. A tensor that was computed from split parameters alone has no samples,
            and DDP averages none of its gradients.
        dim: as the user gave it: 0 is the dimension of samples; -1 is that of features, even if there is only one.
        group: the ranks of the gather or scatter.

    Returns:
        The number of ranks; 1 if DDP averages nothing that has to be added.

    Raises:
        RuntimeError: a reentrant ``torch.utils.checkpoint`` is computing again during backward, where it is not
            known whether DDP called the forward.
    """
    along_samples = dim == 0 or (tensor.ndim > 1 and dim == -tensor.ndim)
    if not along_samples or not torch.is_grad_enabled() or not tensor.requires_grad or _is_of_split_parameters(tensor):
        return 1
    module = active_ddp_module()
    if module is not None:
        averaged = set(dist.get_process_group_ranks(module.process_group))
        return len(averaged.intersection(dist.get_process_group_ranks(group)))
    # A checkpoint with use_reentrant=False recomputes through such a hook, and keeps the graph of the first forward.
    if is_in_backward() and not are_saved_tensors_hooked():
        raise RuntimeError(
            "a gather or scatter along dimension 0 is being computed again by torch.utils.checkpoint with "
            "use_reentrant=True, where it cannot be seen whether DistributedDataParallel will average the gradient: "
            "use use_reentrant=False, or say grad_scale=get_group_size() (1 / get_group_size() for scatter) under "
            "DistributedDataParallel, grad_scale=1 elsewhere"
        )
    return 1


def _is_of_split_parameters(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was computed from split parameters alone. A tensor that nothing computed, such as the model's
    input, counts as one, as it does for DDP.

    The search ends at the first other parameter, which is usually a few steps away.
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
