"""When torch.compile compiles, and whether what runs is a compilation."""

from collections.abc import Callable
from typing import Any

import torch


def watch_compilation(begun: Callable[[], None], ended: Callable[[], None]) -> Callable[[], None]:
    """Calls `begun` and `ended` around each compilation from now on; returns what ends that.

    Why: a step that compiles takes a minute in silence; how much of it is compilation shows nowhere else.

    Checked: torch 2.11 and 2.13. ``torch._dynamo.callback`` calls back around the outermost compilation, also of a
    backward that is compiled when it first runs.

    Public way: none; ``torch.compiler`` tells nothing of what was compiled when.
    """
    from torch._dynamo.callback import callback_handler

    def on_start(_: Any) -> None:
        begun()

    def on_end(_: Any) -> None:
        ended()

    callback_handler.register_start_callback(on_start)
    callback_handler.register_end_callback(on_end)

    def end() -> None:
        # torch._dynamo.reset() may have removed them.
        if on_start in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(on_start)
        if on_end in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(on_end)

    return end


def is_making_graph() -> bool:
    """Whether what runs now is recorded into a graph by torch.compile, rather than computed.

    Why: recomputation keeps other things in a graph than where a compiled block's code falls into several graphs.

    Checked: torch 2.11 and 2.13. ``torch._guards.TracingContext`` is there while one is made.

    Public way: none; ``torch.compiler.is_compiling()`` is false then in torch 2.11, ``is_dynamo_compiling()`` in both.
    """
    return torch._guards.TracingContext.try_get() is not None
