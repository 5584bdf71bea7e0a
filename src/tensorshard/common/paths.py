"""Paths that users give, the text in files, and the folder of what is cached on disk."""

import os
from os import PathLike
from pathlib import Path
from typing import Any


def as_path(path: Any, what: str = "a path, such as 'checkpoints/step-1000'") -> Path:
    """`path` as a Path.

    Args:
        what: says what is expected, for the message.

    Raises:
        TypeError: `path` is no path.
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"path is {path!r}; it must be {what}")
    return Path(path)


def read_utf8(path: Path) -> str:
    """The text in the file `path`.

    Raises:
        ValueError: it is not in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: its byte {error.start} is {error.object[error.start]:#04x}; text in "
            f"another encoding has to be converted, such as by `iconv -f latin1 -t utf-8`"
        ) from error


CACHE_VARIABLE = "TENSORSHARD_CACHE"
"""The environment variable that names the folder of caches, or says ``off``."""


def write_whole(path: Path, text: str) -> None:
    """Writes a text file of UTF-8, whole or not at all: under another name, then renamed."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def cache_folder() -> Path | None:
    """The folder of what is cached on disk; None if nothing is cached.

    That is the folder that ``TENSORSHARD_CACHE`` names, else ``tensorshard`` in ``XDG_CACHE_HOME``, else
    ``~/.cache/tensorshard``. It is None if the variable is ``off``, or if there is no home directory.
    """
    named = os.environ.get(CACHE_VARIABLE, "")
    if named.lower() == "off":
        return None
    if named:
        return Path(named).expanduser()
    above = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(above) if Path(above).is_absolute() else Path.home() / ".cache") / "tensorshard"
    except RuntimeError:
        return None
