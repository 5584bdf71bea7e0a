"""Patches of those parts of torch that assume the same parameters on all ranks, for models in which some are split.

With them, torch's own ``GradScaler``, ``clip_grad_norm_``, ``ZeroRedundancyOptimizer`` and ``DistributedDataParallel``
work on models with parallel layers, as in the TorchShard article, and ``Optimizer.load_state_dict`` refuses another
rank's parts. A patch changes something only if a parameter is split, and only while the model-parallel groups exist.
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


def _put_back(owner: Any, name: str, ours: Any, original: Any) -> None:
    if getattr(owner, name) is ours:  # else somebody has wrapped ours: that stays, and ours goes on to call torch's
        setattr(owner, name, original)
