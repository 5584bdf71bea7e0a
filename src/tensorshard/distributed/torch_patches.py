"""Patches of torch's classes that take all ranks to hold the same parameters, where some are split.

torch's own ``GradScaler``, ``clip_grad_norm_``, ``ZeroRedundancyOptimizer`` and ``DistributedDataParallel`` then work
on models with parallel layers as the TorchShard article prints them, and ``Optimizer.load_state_dict`` refuses other
ranks' parts. What is put in place acts only where a parameter is split, and as long as the model-parallel groups exist.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tensorshard.distributed.split_gradients import agreeing_on_overflows, norm_of_all_shards
from tensorshard.torch_private.optimizers import TOTAL_NORM, UNSCALE_GRADIENTS, clip_grad


def install(groups_exist: Callable[[], bool]) -> Callable[[], None]:
    """Puts all of them in place; returns what takes them away again.

    Args:
        groups_exist: asked at every call. Where it says no, because torch's own ``destroy_process_group`` has ended the
            world, torch's own function is called.
    """
    # Imported when needed: torch's optimizers for distributed training take a while to import.
    from tensorshard.distributed.ddp import leaving_split_parameters_alone
    from tensorshard.distributed.optimizer_state import forget_optimizers, note_whose_states, taking_own_shards
    from tensorshard.distributed.zero_redundancy import ZeroRedundancyOptimizer, with_split_parameters

    with ExitStack() as undo:

        def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
            original = getattr(owner, name)
            ours = _while_they_exist(groups_exist, wrap(original), original)
            setattr(owner, name, ours)
            undo.callback(_put_back, owner, name, ours, original)

        replace(DistributedDataParallel, "__init__", leaving_split_parameters_alone)
        replace(Optimizer, "load_state_dict", taking_own_shards)
        undo.callback(register_optimizer_step_post_hook(note_whose_states).remove)
        undo.callback(forget_optimizers)
        replace(ZeroRedundancyOptimizer, "__init__", with_split_parameters)
        replace(GradScaler, UNSCALE_GRADIENTS, agreeing_on_overflows)
        # clip_grad_norm_ looks this up when it is called, so that it does not matter when a script imported that.
        replace(clip_grad, TOTAL_NORM, norm_of_all_shards)
        return undo.pop_all().close


def _while_they_exist(
    groups_exist: Callable[[], bool], ours: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if groups_exist() else original)(*args, **kwargs)

    return call


def _put_back(owner: Any, name: str, ours: Any, original: Any) -> None:
    if getattr(owner, name) is ours:  # else somebody has wrapped it in turn: theirs stays, and ours hands on to torch's
        setattr(owner, name, original)
