"""Real text that every machine with Python already has: the sources of its standard library."""

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from tensorshard.data.token_dataset import TokenDataset

_SKIPPED_DIRECTORIES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# One file in this many is for validation.
_VALIDATION_EVERY = 20

Split = Literal["train", "validation"]


class StdlibText(TokenDataset):
    """The standard library's ``*.py`` files as bytes (a vocabulary of 256), about 12 MB; next-byte windows.

    Files come in the order of their names, each ended by a zero byte, tests and installed packages left
    out. The split is by file: about 5%, picked by a checksum of the file's name, are for validation, so no
    text is in both.

    Args:
        split: ``"train"`` or ``"validation"``.
        context_length: bytes in a window.
        root: directory to read instead of this Python's standard library.

    Raises:
        ValueError: another split.
        FileNotFoundError: no sources under the root, as where Python ships them compiled or zipped.
    """

    vocab_size = 256

    def __init__(self, split: Split, context_length: int, *, root: str | os.PathLike[str] | None = None) -> None:
        check_split(split)
        directory = Path(root if root is not None else sysconfig.get_path("stdlib"))
        text = b"".join(text + b"\0" for text in read_sources(directory, split))
        if not text:
            raise FileNotFoundError(
                f"There is no text of the {split} split among the *.py files under {directory}; "
                "give a root that holds Python sources, or write your own text with write_token_file."
            )
        super().__init__(np.frombuffer(text, dtype=np.uint8), context_length)


def check_split(split: str) -> None:
    """Refuses what is no split.

    Raises:
        ValueError: it is none.
    """
    if split not in ("train", "validation"):
        raise ValueError(f'split is {split!r}; expected "train" or "validation".')


def read_sources(root: Path, split: Split) -> Iterator[bytes]:
    """The ``*.py`` files of a split under `root`, in the order of their names."""
    for directory, subdirectories, files in os.walk(root):
        # os.walk descends in the order that this list has afterwards.
        subdirectories[:] = sorted(set(subdirectories) - _SKIPPED_DIRECTORIES)
        for name in sorted(files):
            path = Path(directory, name)
            if path.suffix == ".py" and _split_of(path.relative_to(root).as_posix()) == split:
                try:
                    yield path.read_bytes()
                except OSError:
                    continue


def _split_of(relative_path: str) -> Split:
    return "validation" if zlib.crc32(relative_path.encode()) % _VALIDATION_EVERY == 0 else "train"
