"""Calls of a head's other methods, which hooks on modules do not see: these see only calls of ``forward``."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from tensorshard.loss.heads.under_plan.head_checks import find_heads

_METHODS = ("topk", "logits")  # the methods that read the weight; others call these


def gather_for_heads(model: nn.Module) -> None:
    """Makes heads that FSDP shards as units of their own gather their weight also for these methods."""
    for head in find_heads(model).values():
        if isinstance(head, FSDPModule):
            for method in _METHODS:
                register_fsdp_forward_method(head, method)


def call_before_heads(module: nn.Module, action: Callable[[], None]) -> None:
    """Calls `action` before these methods of the heads in `module`."""
    for head in find_heads(module).values():
        for method in _METHODS:
            setattr(head, method, partial(_after, action, getattr(head, method)))


def _after(action: Callable[[], None], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    action()
    return method(*args, **kwargs)
