"""When torch.compile compiles, and whether the running code is being compiled."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch


def watch_compilation(begun: Callable[[], None], ended: Callable[[], None]) -> Callable[[], None]:
    """Calls `begun` and `ended` around each compilation from now on. Returns a function that stops this.

    Why: a step that compiles may take a minute without output; nothing else shows how much of it is compilation.

    Checked: torch 2.13 and 2.15. ``torch._dynamo.callback`` calls back around the outermost compilation, also of a
    backward that is compiled when it first runs.

    Public way: none; ``torch.compiler`` does not say what was compiled when.
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


def is_called_by_compiled_code() -> bool:
    """Whether what runs now, itself not compiled, was called by code that the user gave to torch.compile.

    Why: between two graphs ``torch.compiler.is_compiling()`` is false.

    Checked: torch 2.13 and 2.15. All compiled code is called by functions of ``torch._dynamo.eval_frame``.

    Public way: none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False


def is_making_graph() -> bool:
    """Whether torch.compile is recording the running code into a graph, rather than running it.

    Why: recomputation keeps other results in a graph than in a compiled block whose code falls into several graphs.

    Checked: torch 2.13 and 2.15. ``torch._guards.TracingContext`` exists while a graph is recorded.

    Public way: none; ``torch.compiler.is_dynamo_compiling()`` is false then.
    """
    return torch._guards.TracingContext.try_get() is not None


@contextmanager
def explained_compilation() -> Iterator[None]:
    """Inside, an error of torch.compile itself is raised with advice.

    Why: if the compiler fails on a user's block, the traceback is of its own code, as for InductorError with some
    convolutions whose sizes differ from block to block.

    Checked: torch 2.13 and 2.15, for errors of Dynamo and of its backends.

    Public way: none; the classes are in ``torch._dynamo.exc``.

    Raises:
        RuntimeError: in place of the compiler's error.
    """
    try:
        yield
    except Exception as error:
        # Looked up here, since importing the compiler takes seconds, and other errors do not need it.
        dynamo = sys.modules.get("torch._dynamo.exc")
        if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])  # "backend='inductor' raised:"
        raise RuntimeError(
            f"torch.compile failed on a block of the model ({type(error).__name__}: {cause}). Set compile=False, or "
            f"the environment variable TORCHDYNAMO_SUPPRESS_ERRORS=1, with which torch runs such code as it is"
        ) from error
