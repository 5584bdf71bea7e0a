"""torch's ``GradScaler`` and ``clip_grad_norm_`` on models of which some parameters are split.

Both take the gradients of a whole model. Of a split parameter each rank has another shard's: an overflow in one is
everybody's, and the norm of the model counts all of them. Beside a model-parallel group other gradients are copies.
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
    """``GradScaler``'s unscaling of an optimizer's gradients, after which all ranks skip the step, or none.

    Args:
        original: torch's, which unscales this rank's gradients.
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
    """``torch.nn.utils.get_total_norm``, which counts all shards of gradients of which this rank has one.

    Args:
        original: torch's, of tensors of which a rank has all.

    Returns:
        A function that returns torch's own result where no gradient is a shard, and otherwise one that is equal on
        every rank of the groups that hold them.
    """

    @torch.no_grad()
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # Groups of one hold all of what they split.
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
        return original([norm], torch.inf, error_if_nonfinite, foreach)  # which is itself, or torch's own error

    return total_norm


def _groups_of(split: Iterable[torch.Tensor]) -> list[dist.ProcessGroup]:
    """The groups over which parameters are split, in the order of the list, which is that of every rank."""
    return list(dict.fromkeys(own_group(parameter) for parameter in split))
