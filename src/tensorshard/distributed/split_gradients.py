"""torch's ``GradScaler`` and ``clip_grad_norm_`` on models of which some parameters are split.

Both assume that a rank has every gradient of the model. Of a split parameter, each rank has the gradient of its own
shard alone. So if one rank finds an overflow, all have to skip the step, and the norm has to count the shards of all
ranks. The gradients of all other parameters are the same on every rank, and count once.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm import primitives
from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.marks import get_mark, split_parameters_by_gradient
from tensorshard.comm.sharded_tensors import own_group


def agreeing_on_overflows(original: Callable[..., dict[torch.device, torch.Tensor]]) -> Callable[..., Any]:
    """Wraps ``GradScaler``'s unscaling of an optimizer's gradients: if one rank finds an overflow, all skip the step.

    Args:
        original: torch's own, which unscales this rank's gradients.
    """

    def unscale(
        scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> dict[torch.device, torch.Tensor]:
        found = original(scaler, optimizer, *args, **kwargs)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for group in _groups_of([p for p in parameters if p.requires_grad and get_mark(p) is not None]):
            for overflow in found.values():
                all_reduce_(overflow, group, dist.ReduceOp.MAX)
        return found

    return unscale


def norm_of_all_shards(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps ``torch.nn.utils.get_total_norm``: the norm counts the shards of all ranks.

    Args:
        original: torch's own, which counts this rank's tensors alone.

    Returns:
        A function of the same arguments. If no gradient is a shard, it returns torch's own result. Otherwise its
        result is the same on every rank of the groups that hold the shards.
    """

    @torch.no_grad()
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # In a group of one rank, the shard is the full parameter.
        split = {key: p for key, p in split_parameters_by_gradient().items() if own_group(p).size() > 1}
        shards = [tensor for tensor in listed if id(tensor) in split]
        if not shards:
            return original(listed, norm_type, error_if_nonfinite, foreach)
        norms = [original([t for t in listed if id(t) not in split], norm_type, False, foreach).to(shards[0].device)]
        for group in _groups_of([split[id(shard)] for shard in shards]):
            held = [s for s in shards if own_group(split[id(s)]) is group and s.numel()]
            norm = original(held, norm_type, False, foreach).to(norms[0].device)
            norms += primitives.gather_flat(norm.view(1).float(), group).flatten().unbind()
        norm = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), float(norm_type))
        # The largest of one number is that number. torch raises its own error where it is not finite.
        return original([norm], torch.inf, error_if_nonfinite, foreach)

    return total_norm


def _groups_of(split: Iterable[torch.Tensor]) -> list[dist.ProcessGroup]:
    """The groups over which parameters are split, in the order of the list, which is the same on every rank."""
    return list(dict.fromkeys(own_group(parameter) for parameter in split))
