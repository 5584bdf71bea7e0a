"""Patches of those parts of torch that assume the same parameters on all ranks, for models in which some are split.

With them, torch's own ``GradScaler``, ``clip_grad_norm_``, ``ZeroRedundancyOptimizer`` and ``DistributedDataParallel``
work on models with parallel layers, as in the TorchShard article, and ``Optimizer.load_state_dict`` refuses another
rank's parts. A patch changes something only if a parameter is split, and only while the model-parallel groups exist.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tensorshard.comm import primitives
from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.marks import get_mark, split_parameters_by_gradient
from tensorshard.comm.sharded_tensors import own_group
from tensorshard.torch_private.optimizers import TOTAL_NORM, UNSCALE_GRADIENTS, clip_grad
from tensorshard.torch_private.patches import replaced


def install(groups_exist: Callable[[], bool]) -> Callable[[], None]:
    """Installs all patches; returns a function that removes them.

    Args:
        groups_exist: called whenever a patched function is. If it returns False, as after torch's own
            ``destroy_process_group``, torch's own function runs.
    """
    # Imported when needed: torch's optimizers for distributed training take a while to import.
    from tensorshard.distributed.ddp import leaving_split_parameters_alone
    from tensorshard.distributed.optimizer_state import forget_optimizers, note_whose_states, taking_own_shards
    from tensorshard.distributed.zero_redundancy import ZeroRedundancyOptimizer, with_split_parameters

    with ExitStack() as undo:

        def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
            def make(original: Any) -> Any:
                return _while_they_exist(groups_exist, wrap(original), original)

            undo.enter_context(replaced(owner, name, make))

        replace(DistributedDataParallel, "__init__", leaving_split_parameters_alone)
        replace(Optimizer, "load_state_dict", taking_own_shards)
        undo.callback(register_optimizer_step_post_hook(note_whose_states).remove)
        undo.callback(forget_optimizers)
        replace(ZeroRedundancyOptimizer, "__init__", with_split_parameters)
        replace(GradScaler, UNSCALE_GRADIENTS, agreeing_on_overflows)
        # clip_grad_norm_ looks this name up when it is called. So a script may have imported clip_grad_norm_ before.
        replace(clip_grad, TOTAL_NORM, norm_of_all_shards)
        return undo.pop_all().close


def _while_they_exist(
    groups_exist: Callable[[], bool], ours: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if groups_exist() else original)(*args, **kwargs)

    return call


def agreeing_on_overflows(original: Callable[..., dict[torch.device, torch.Tensor]]) -> Callable[..., Any]:
    """Wraps ``GradScaler``'s unscaling of an optimizer's gradients: if one rank finds an overflow, all skip the step.

    Args:
        original: torch's own, which unscales this rank's gradients.
    """

    def unscale(
        scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> dict[torch.device, torch.Tensor]:
        overflows = original(scaler, optimizer, *args, **kwargs)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for group in _groups_of([p for p in parameters if p.requires_grad and get_mark(p) is not None]):
            for overflow in overflows.values():
                all_reduce_(overflow, group, dist.ReduceOp.MAX)
        return overflows

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
