"""What surrounds each forward of a model, wherever it is called: by hooks, outside of all that replaces a forward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from torch import nn


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
