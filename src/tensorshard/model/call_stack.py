"""Reads the call stack: whether a user's code asks for a tensor, and which line of it is running.

Walking the stack takes some microseconds, so it is done only where a tensor would be gathered, or a run is examined.
"""

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from tensorshard.common.words import is_inside
from tensorshard.torch_private.modules import called_module

_MARK = "_tensorshard_computes_on_parts"  # the key in a module's __dict__, which its deep copies have, too
_OWN = "tensorshard"
_USERS = "tensorshard.models"  # models as users write them
_PASSED_ON = ("torch", "tensorshard.model.watched_parameters", "tensorshard.engine.optimizer_states")

_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARIES = tuple(
    f"{Path(path).resolve()}{os.sep}" for path in (Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)
_INSTALLED = tuple(f"{Path(sysconfig.get_path(name)).resolve()}{os.sep}" for name in ("purelib", "platlib"))
_STEPS = str(_PACKAGE / "predict" / "watched_steps.py")  # calls the Engine: frames outside of it are no model's


def mark_modules(model: nn.Module) -> None:
    """Marks `model` and what is in it: while one of them is called, code computes with parts."""
    for module in model.modules():
        vars(module)[_MARK] = True


def is_called_by_user(first: FrameType | None, optimizer: Any = None, *, within_calls: bool = False) -> bool:
    """Whether the frame `first` was called by code of the user's, outside of calls of marked modules.

    With `within_calls`, also within them.

    It was not if the next code that is not torch's is tensorshard's. Nor if a marked module's call is under way
    further out, or loading or conversion of it, or a method of `optimizer`.
    """
    frame = first
    asking = True  # whether the code that asks has yet to be met
    while frame is not None:
        if asking:
            name = frame.f_globals.get("__name__", "")
            if not is_inside(name, _PASSED_ON):
                if is_inside(name, [_OWN]) and not is_inside(name, [_USERS]):
                    return False
                asking = False
                if within_calls:
                    return True
        code = frame.f_code
        module = called_module(frame, or_loaded=True)
        if module is not None:
            if _MARK in vars(module):
                return False
        elif optimizer is not None and code.co_varnames[:1] == ("self",) and frame.f_locals.get("self") is optimizer:
            return False
        frame = frame.f_back
    return True


def users_line(frame: FrameType | None = None) -> str:
    """The line as "gpt.py:71"; "" if there is none, as in the backward of torch's own functions.

    Args:
        frame: the innermost one that is looked at; None for the caller's.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _STEPS:
            return ""
        name = _short_name(file)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@cache
def _short_name(file: str) -> str:
    """The file's name, with its folder's name before it if it is installed; "" for a file of a library."""
    if file.startswith("<"):
        return ""
    path = str(Path(file).resolve())
    if path.startswith(f"{_PACKAGE}{os.sep}"):
        return Path(file).name if path.startswith(str(_PACKAGE / "models")) else ""
    installed = path.startswith(_INSTALLED)
    if installed and Path(path).name == "typing_extensions.py":  # its wrappers of deprecated functions
        return ""
    if path.startswith(_LIBRARIES[0]) or (path.startswith(_LIBRARIES[1]) and not installed):
        return ""
    return "/".join(Path(path).parts[-2:]) if installed else Path(path).name
