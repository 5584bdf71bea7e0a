"""Calls of custom autograd functions, and forwards that are repeated in backward."""

import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

IDENTITIES = ("_DDPSink",)
"""Names of the autograd functions of DDP that return their arguments."""

PLAIN_MARKERS = ("_NoopSaveInputs",)
"""Names of autograd functions that look at none of their arguments' values."""


def repeated_forwards() -> tuple[Any, str]:
    """Where ``torch.utils.checkpoint`` with ``use_reentrant=False`` takes the function that it repeats in backward, as
    the first argument: a module and the name of its attribute.

    Why: a forward that is repeated in backward needs the context that it first ran in, whoever calls backward.

    Checked: torch 2.13 and 2.15, where the older name is there for others, and is not called.

    Public way: ``context_fn``, for who calls ``checkpoint`` oneself.
    """
    name = "_checkpoint_without_reentrant_generator"
    return checkpoint, f"{name}_impl" if hasattr(checkpoint, f"{name}_impl") else name


CHECKPOINT_NODE = "CheckpointFunctionBackward"
"""What such a function is called in a graph."""

HOOKED_NODE = "BackwardHookFunctionBackward"
"""What the outputs and inputs of modules with backward hooks go through in a graph."""


def is_checkpointing() -> bool:
    """Whether the caller is inside of a forward that a checkpoint repeats as one autograd function.

    Why: what is inside has no graph until backward.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def is_reentrant_checkpoint(function: type[torch.autograd.Function]) -> bool:
    """Whether this is the autograd function of ``torch.utils.checkpoint`` with ``use_reentrant=True``.

    Its arguments are the function to repeat, whether random states are kept, and that function's arguments.

    Why: the function has to be given whole-looking tensors again in backward, where autograd kept their parts.

    Checked: torch 2.13.

    Public way: none.
    """
    return function is CheckpointFunction


class FunctionCalls:
    """All calls of custom autograd functions. They go to `guard(cls, args, kwargs)` while :attr:`guarded` is in place.

    Where ``torch.autograd.Function.apply`` is written in Python, its code is replaced, which bound methods share: a
    call through an ``apply`` that was taken long ago (``f = F.apply``) is guarded as well. In torch 2.15 it is written
    in C, and the attribute of the class is replaced.

    Why: functions that know no tensor classes have to be given plain tensors before autograd looks at them.

    Checked: torch 2.13 and 2.15.

    Public way: none for a method that is bound already.

    Attributes:
        sees_bound: whether calls through an ``apply`` that was taken before are guarded.
        place: what has to be replaced, an object and the name of its attribute.
        guarded: what to replace it by.
    """

    guard: Callable[[Any, Any, Any], Any]

    def __init__(self) -> None:
        descriptor: Any = vars(torch.autograd.Function)["apply"]
        f: FunctionType | None = getattr(descriptor, "__func__", None)
        self.sees_bound = f is not None
        self._original: Callable[..., Any]
        self.place: tuple[Any, str]
        self.guarded: Any
        if f is None:
            self.place, self.guarded = (torch.autograd.Function, "apply"), classmethod(_ask)
            self._original = lambda cls, *args, **kwargs: descriptor.__get__(None, cls)(*args, **kwargs)
        else:
            self.place, self.guarded = (f, "__code__"), _code_that_asks()
            self._original = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)

    def apply(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """``cls.apply(*args, **kwargs)`` as torch does it."""
        return self._original(cls, *args, **kwargs)


def _ask(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return function_calls.guard(cls, args, kwargs)


def _code_that_asks() -> CodeType:
    __class__ = object  # torch's function refers to its class, and its code may only be replaced by one that does, too

    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        _ = __class__
        from tensorshard.torch_private.recomputation import function_calls

        return function_calls.guard(cls, args, kwargs)

    return apply.__code__


function_calls = FunctionCalls()
