"""Paths as users give them."""

from os import PathLike
from pathlib import Path
from typing import Any


def as_path(path: Any, what: str = "a path, such as 'checkpoints/step-1000'") -> Path:
    """`path` as a Path.

    Args:
        what: what it should be, for the message.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"path is {path!r}; it must be {what}")
    return Path(path)
