"""Whose fault an exception is that ended a run of a model, and in which module; explains those about two types."""

import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from tensorshard.common.words import with_article
from tensorshard.model.provenance import run_operation
from tensorshard.model.reachable_state import is_foreign
from tensorshard.torch_private.modules import arguments_of_call, called_module

_PACKAGE = Path(__file__).parents[1]
_MODELS = _PACKAGE / "models"  # they count as users' models
_TORCH = Path(torch.__file__).parent
_CHECKS = _PACKAGE / "layers" / "arguments.py"
_MODES = ("__torch_function__", "__torch_dispatch__")
_LIBRARY, _SITE = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))

_SIGNS = ("dtype", "scalar type", "same type", "Input type (", "data type")
_TYPES = ("BFloat16", "Half", "bfloat16", "float16")


def raised_by_model(error: Exception) -> bool:
    """Whether `error` says that a model cannot run in a certain way; else it is a fault of this package.

    ValueError, IndexError, RuntimeError and ArithmeticError stand for wrong shapes, indices and values. They say that
    the model cannot run so, wherever they are raised, in the layers of this package too. Other errors (AssertionError,
    AttributeError, KeyError, NotImplementedError, TypeError, ...) say so if the model's code raised them. To find that
    out, take the innermost frame that is neither torch's nor the standard library's: its file must not belong to this
    package. A call of a module counts as a frame of the file of its class. What torch's layers assert about shapes, and
    what this package's layers refuse among their arguments, are errors of the first kind. Too little memory says
    nothing about a model.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return False
    by_values = isinstance(error, ValueError | IndexError | RuntimeError | ArithmeticError)
    if by_values and not isinstance(error, NotImplementedError | RecursionError):
        return True
    frames = _frames(error.__traceback__)
    if isinstance(error, AssertionError) and frames and _is_inside(frames[-1].f_code.co_filename, _TORCH / "nn"):
        return True
    if isinstance(error, TypeError) and frames and Path(frames[-1].f_code.co_filename) == _CHECKS:
        return True
    for frame in reversed(frames):
        if frame is not frames[-1] and frame.f_code.co_name in _MODES:  # a mode that only passes an operation on
            continue
        owned = _is_of_package(frame)
        if owned is not None:
            return not owned
    return True


def raised_in_operation(error: Exception) -> bool:
    """Whether an operation of torch, or a layer of this package, raised `error`, and not the model's code."""
    frames = _frames(error.__traceback__)
    return bool(frames) and any(_is_inside(frames[-1].f_code.co_filename, folder) for folder in (_PACKAGE, _TORCH))


def failed_line(error: Exception) -> tuple[str, int] | None:
    """File and line of the model's code that ended with `error`; None if it is not known."""
    folders = (_PACKAGE, _TORCH)
    traceback, line = error.__traceback__, None
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if _is_inside(file, _MODELS) or not any(_is_inside(file, folder) for folder in folders):
            line = file, traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _frames(traceback: TracebackType | None) -> list[FrameType]:
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def _is_of_package(frame: FrameType) -> bool | None:
    """Whether this package raised the error that has `frame` as its innermost; None if that depends on the caller."""
    if frame.f_code is run_operation.__code__:  # it runs an operation of the model
        return None
    file = frame.f_code.co_filename
    called = called_module(frame)
    if called is not None:
        file = getattr(sys.modules.get(type(called).__module__), "__file__", None) or ""
        return _is_inside(file, _PACKAGE) and not _is_inside(file, _MODELS)
    if _is_inside(file, _PACKAGE):
        return not _is_inside(file, _MODELS)
    if _is_inside(file, _TORCH) or (_is_inside(file, _LIBRARY) and not _is_inside(file, _SITE)):
        return None
    return None if file.startswith("<frozen ") else False


def _is_inside(file: str, folder: Path) -> bool:
    return Path(file).is_relative_to(folder)


def failed_module(error: BaseException, model: nn.Module) -> str:
    """The innermost module of `model` in whose call `error` was raised, and what it was called with, as the end of a
    sentence; "" if the error is of `model` itself."""
    names = {id(module): name for name, module in model.named_modules()}
    failed = ""
    for frame in _frames(error.__traceback__):
        module = called_module(frame)
        name = names.get(id(module))
        if module is not None and name:
            args, kwargs = arguments_of_call(frame)
            given = [*args, *([kwargs] if kwargs else [])]
            kind = f"{type(module).__name__}({module.extra_repr()})"
            failed = f"; it failed in {name!r}, {with_article(kind)}, which was called with {describe_batch(given)}"
    return failed


def describe_batch(tree: Any) -> str:
    """The types and shapes of a batch, or of a module's arguments."""
    if isinstance(tree, torch.Tensor):
        return f"{tree.dtype} {list(tree.shape)}"
    if isinstance(tree, Mapping):
        return ", ".join(f"{name}={describe_batch(value)}" for name, value in tree.items()) or "nothing"
    if isinstance(tree, tuple | list):
        return ", ".join(map(describe_batch, tree)) or "nothing"
    return "None" if tree is None else type(tree).__name__


class MixedTypesError(RuntimeError):
    """A module mixes 16-bit tensors with fp32 ones in an operation that takes one type."""


@contextmanager
def explained_types(precision: str) -> Iterator[None]:
    """A context for a forward.

    Args:
        precision: of the plan.

    Raises:
        MixedTypesError: in place of torch's error that tensors differ in type; names the module.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, MixedTypesError) or not _is_of_types(text):
            raise
        named = _module_of(error.__traceback__)
        if named is None:
            raise
        raise MixedTypesError(
            f"module {named} mixes 16-bit tensors with fp32 ones ({text.splitlines()[0]}): under "
            f"precision={precision!r} parameters and the results of products have 16 bits, and buffers, other tensors "
            f"and new ones stay fp32. Convert one of the operands in its forward, as in a.to(b.dtype)"
        ) from error


def _is_of_types(text: str) -> bool:
    return any(sign in text for sign in _SIGNS) and any(name in text for name in _TYPES)


def _module_of(traceback: TracebackType | None) -> str | None:
    """The innermost module of the user's whose code was running, by its name and class; None if there is none."""
    running: list[nn.Module] = []
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            running.append(owner)
        traceback = traceback.tb_next
    users = [module for module in running if not is_foreign(type(module).__module__)] or running
    if not users:
        return None
    names = {id(module): name for name, module in running[0].named_modules()}
    name, kind = names.get(id(users[-1])), type(users[-1]).__name__
    return f"{name!r} ({kind})" if name else kind
