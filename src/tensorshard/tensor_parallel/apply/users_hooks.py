"""Hooks that users register on modules of a laid-out model are the user's code, though they run within forwards."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

from torch import nn

_REGISTERS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)


def surround_later_hooks(model: nn.Module, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Runs the hooks that are registered from now on, on `model` and modules in it, within a ``context()``."""
    for module in model.modules():
        for name in _REGISTERS:
            vars(module)[name] = partial(_register, getattr(type(module), name), module, context)


def _register(
    register: Callable[..., Any],
    module: nn.Module,
    context: Callable[[], AbstractContextManager[None]],
    hook: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    @wraps(hook, updated=())
    def surrounded(*given: Any, **options: Any) -> Any:
        with context():
            return hook(*given, **options)

    return register(module, surrounded, *args, **kwargs)
