"""What surrounds each forward of a model, wherever it is called: by hooks, outside of all that replaces a forward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn


def as_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function that calls `method`.

    ``copy.deepcopy`` of a module takes functions among its hooks as they are; of a bound method it would copy the
    object, and the ranks' process groups with it.
    """

    def call(*args: Any) -> Any:
        return method(*args)

    return call


def surround_forwards(model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Has each forward of `model`, with its other hooks, run within a ``context()``, which ends whatever it raises."""
    opened: list[ExitStack] = []

    def enter(*_: object) -> None:
        opened.append(ExitStack())
        opened[-1].enter_context(context())

    def leave(*_: object) -> None:
        if opened:
            opened.pop().close()

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)
