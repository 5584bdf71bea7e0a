"""Finds the line of the user's code that is running: the innermost one outside of torch, Python and this package."""

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARIES = tuple(
    f"{Path(path).resolve()}{os.sep}" for path in (Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)
_INSTALLED = tuple(f"{Path(sysconfig.get_path(name)).resolve()}{os.sep}" for name in ("purelib", "platlib"))
_STEPS = str(_PACKAGE / "estimate" / "watched_steps.py")  # calls the Engine: frames outside of it are no model's


def users_line() -> str:
    """The line as "gpt.py:71"; "" if there is none, as in the backward of torch's own functions."""
    frame = sys._getframe(1)
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
    if path.startswith(_LIBRARIES[0]) or (path.startswith(_LIBRARIES[1]) and not installed):
        return ""
    return "/".join(Path(path).parts[-2:]) if installed else Path(path).name
