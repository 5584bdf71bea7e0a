"""Code around each forward of a model, wherever it is called. Hooks run it, outside of all replaced forwards."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn


def as_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function that calls `method`.

    ``copy.deepcopy`` of a module keeps functions among its hooks as they are. Of a bound method it would copy the
    object, with the ranks' process groups.
    """

    def call(*args: Any) -> Any:
        return method(*args)

    return call


def surround_forwards(model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Runs each forward of `model`, with its other hooks, within a ``context()``, which also ends after an error."""
    opened: list[ExitStack] = []

    def enter(*_: object) -> None:
        opened.append(ExitStack())
        opened[-1].enter_context(context())

    def leave(*_: object) -> None:
        if opened:
            opened.pop().close()

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)
