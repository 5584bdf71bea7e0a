"""Whether code of the user's asks for a tensor, or code that computes with the part that this rank holds.

Found from the call stack. That takes some microseconds, so that it is asked only where a tensor would be gathered.
"""

from types import FrameType
from typing import Any

from torch import nn

from tensorshard.torch_private.modules import MODULE_CALLS, MODULE_LOADS

_MARK = "_tensorshard_computes_on_parts"  # the key in a module's __dict__, which its deep copies have, too
_OWN = "tensorshard"
_USERS = "tensorshard.models"  # models as users write them
_PASSED_ON = ("torch", "tensorshard.model.watched_parameters", "tensorshard.model.written_through")


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
            if not _is_within(name, *_PASSED_ON):
                if _is_within(name, _OWN) and not _is_within(name, _USERS):
                    return False
                asking = False
                if within_calls:
                    return True
        code = frame.f_code
        if code in _MODULE_CODE:
            if _MARK in vars(frame.f_locals["self"]):
                return False
        elif optimizer is not None and code.co_varnames[:1] == ("self",) and frame.f_locals.get("self") is optimizer:
            return False
        frame = frame.f_back
    return True


def _is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


_MODULE_CODE = frozenset((*MODULE_CALLS, *MODULE_LOADS))
