"""Modes and tensor classes that see every operation.

`TorchDispatchMode`: the base class of modes that see each operator call, after autograd.

Why: constructors are recorded, and values are followed through a model, operator by operator.

Checked: torch 2.13 and 2.15.

Public way: none. ``torch.overrides.TorchFunctionMode`` is public, but sees Python functions, and not what custom
autograd functions and C++ code call.

`NOT_CALLED`: as a class's ``__torch_function__``, it makes torch's functions treat the tensors as plain ones.

Why: a parameter that overrides an attribute is not to make functions slower.

Checked: torch 2.13 and 2.15.

Public way: ``torch._C._disabled_torch_function_impl``, which torch's notes on extending it name.
"""

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C import _disabled_torch_function_impl as NOT_CALLED
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

__all__ = [
    "NOT_CALLED",
    "TorchDispatchMode",
    "WithoutTorchFunctions",
    "dispatch_modes",
    "has_dispatch_mode",
    "innermost_dispatch_mode",
    "make_wrapper_tensor",
    "python_body",
    "without_dispatch_modes",
    "without_torch_functions_of_tensors",
]


def has_dispatch_mode() -> bool:
    """Whether a dispatch mode watches or fakes the operations.

    Why: work that otherwise uses several streams, or is written by hand, is then done in plain operations, in order.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return _get_current_dispatch_mode() is not None


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes that see operations, the one that sees them first at the end.

    Why: selective recomputation is told of a result whatever modes are further in.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    modes: list[TorchDispatchMode] = _get_current_dispatch_mode_stack()
    return modes


def innermost_dispatch_mode() -> TorchDispatchMode | None:
    """The dispatch mode that sees operations first; None if there is none.

    Why: a mode that is there for one kernel is left for the work that a hook does before and after it.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    mode: TorchDispatchMode | None = _get_current_dispatch_mode()
    return mode


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Leaves all dispatch modes, to compute something real that none of them should see.

    Why: the tracer samples inputs, and runs operators without a fake kernel for real, in the middle of a traced run.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return _disable_current_modes()


WithoutTorchFunctions = torch._C.DisableTorchFunctionSubclass
"""The class of the contexts of :func:`without_torch_functions_of_tensors`, for code that runs for every parameter.

Why, checked, public way: as for that function.
"""


def without_torch_functions_of_tensors() -> AbstractContextManager[Any]:
    """Inside, torch's functions do not call ``__torch_function__`` of the tensors they are given.

    Why: a tensor class that answers a question about itself, such as its shape, would otherwise be asked again.

    Checked: torch 2.13 and 2.15.

    Public way: ``super().__torch_function__``, which turns every result into a tensor of the class.
    """
    return torch._C.DisableTorchFunctionSubclass()


def make_wrapper_tensor(
    cls: type[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of class `cls` that has a shape, a type and a device, and no memory.

    Why: logits that are split over ranks look whole to code that asks for their shape.

    Checked: torch 2.13 and 2.15.

    Public way: none. It is in PyTorch's notes on extending tensors, but has no public name.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


@functools.cache
def python_body(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function of ``torch.nn.functional`` that runs its Python code whatever class its tensors have, or None if it is
    another function, or has no Python code.

    Why: a tensor class with rules for some functions takes others by what these call.

    Checked: torch 2.13 and 2.15, whose code begins with questions by three names whether a class takes it over.

    Public way: none; what a ``__torch_function__`` calls asks the class again, or no class at all.
    """
    if not isinstance(func, types.FunctionType) or func.__module__ not in ("torch.nn.functional", "torch.functional"):
        return None

    def no(*args: Any, **kwargs: Any) -> bool:
        return False

    names = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), no)
    body = types.FunctionType(
        func.__code__, {**func.__globals__, **names}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body
