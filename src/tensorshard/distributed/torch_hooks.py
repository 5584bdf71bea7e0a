"""The places of torch that treat all parameters of a model alike, and have to be told of split ones.

torch's own ``GradScaler``, ``clip_grad_norm_``, ``ZeroRedundancyOptimizer`` and ``DistributedDataParallel`` then work
on models with parallel layers as the TorchShard article prints them, and ``Optimizer.load_state_dict`` refuses other
ranks' parts. What is put in place acts only where a parameter is split, and as long as the model-parallel groups exist.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from tensorshard.distributed.mixed_gradients import clipping_of_mixture, total_norm_of_mixture, unscale


def install() -> Callable[[], None]:
    """Puts all of them in place; returns what takes them away again."""
    # These import the module of the groups, which imports this one; and few programs need what they bring in.
    from tensorshard.distributed.data_parallel import leaving_split_parameters_alone
    from tensorshard.distributed.optimizer_state import refusing_foreign_parts
    from tensorshard.distributed.zero_redundancy import ZeroRedundancyOptimizer, aware_of_split_parameters

    undo = ExitStack()
    _replace(undo, DistributedDataParallel, "__init__", leaving_split_parameters_alone)
    _replace(undo, Optimizer, "load_state_dict", refusing_foreign_parts)
    _replace(undo, ZeroRedundancyOptimizer, "__init__", aware_of_split_parameters)
    # clip_grad_norm_ looks these up when it is called, so that it does not matter when a script imported that.
    _replace(undo, clip_grad, "_get_total_norm", total_norm_of_mixture)
    _replace(undo, clip_grad, "_clip_grads_with_norm_", clipping_of_mixture)
    handlers = DTensor._op_dispatcher._custom_op_handlers
    operation = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    undo.callback(handlers.__setitem__, operation, handlers[operation])
    handlers[operation] = unscale
    return undo.close


def _replace(undo: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Sets an attribute to what `wrap` makes of its value; `undo` puts the value back."""
    original = getattr(owner, name)
    undo.callback(setattr, owner, name, original)
    setattr(owner, name, wrap(original))
