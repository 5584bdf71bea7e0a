"""Text as windows of tokens: of files, or of Python's standard library; as bytes, or by a tokenizer."""

import csv
import glob
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tensorshard.data.token_dataset import TokenDataset

_SKIPPED_DIRECTORIES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# One file in this many is for validation.
_VALIDATION_FILE_EVERY = 20

Split = Literal["train", "validation"]
# So much of the standard library is turned into tokens, which takes some seconds.
_STDLIB_BYTES = 1 << 20
# One part or row in this many is for validation.
_VALIDATION_EVERY = 10
_PART = 4096
_PIECE = 400
_PACKAGES = ("asyncio", "email", "unittest", "multiprocessing", "importlib", "http", "xml", "ctypes", "json", "logging")
BYTES = "bytes"


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
    return "validation" if zlib.crc32(relative_path.encode()) % _VALIDATION_FILE_EVERY == 0 else "train"


class Text(TokenDataset):
    """Text as windows of tokens, each with its next tokens: see :class:`TokenDataset`.

    It is made in each process at each start. For much text, write a token file (``tensorshard data tokenize``) and take
    a :class:`TokenDataset`.

    Args:
        split: "train" or "validation": every tenth part of the text, of 4096 characters, is for validation.
        context_length: tokens in a window.
        tokenizer: a ``tokenizer.json``, a directory that has one, or "bytes".
        files: text files in UTF-8: paths, or patterns such as ``"texts/*.txt"``; None for a megabyte of the sources of
            Python's standard library.

    Raises:
        FileNotFoundError: there is no such file, or no tokenizer.
        ValueError: another split; a file that is no text; less than one window.
    """

    def __init__(
        self, split: Split, context_length: int, tokenizer: str, files: str | Sequence[str] | None = None
    ) -> None:
        check_split(split)
        codec = find_codec(tokenizer)
        texts = _stdlib(split) if files is None else _parts(files, split)
        tokens = np.array([token for text in texts for token in codec.encode(text)], dtype=np.int64)
        if len(tokens) <= context_length:
            raise ValueError(
                f"the {split} split of {'the standard library' if files is None else files} has {len(tokens)} tokens; "
                f"a window of context_length {context_length} and its next token need {context_length + 1}: give more "
                f"text, or a smaller context_length"
            )
        super().__init__(tokens, context_length)


def _stdlib(split: Split) -> list[str]:
    sources = [source.decode(errors="replace") for source in read_sources(Path(sysconfig.get_path("stdlib")), split)]
    sizes = accumulate(map(len, sources))
    return [source for source, _ in zip(sources, takewhile(lambda size: size < _STDLIB_BYTES, sizes), strict=False)]


def _parts(files: str | Sequence[str], split: Split) -> Iterator[str]:
    number = 0
    for pattern in [files] if isinstance(files, str) else files:
        paths = sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise FileNotFoundError(f"there is no text file {pattern}; give paths or patterns of text files in UTF-8")
        for file in paths:
            text = _read(Path(file))
            for start in range(0, len(text), _PART):
                if _is_of(split, number):
                    yield text[start : start + _PART]
                number += 1


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error}") from error


def _is_of(split: Split, number: int) -> bool:
    return (number % _VALIDATION_EVERY == _VALIDATION_EVERY - 1) == (split == "validation")


class LabelledText(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Text with a class each, for a classifier of transformers.

    Item ``i`` is ``({"input_ids": ..., "attention_mask": ...}, class)``: int64 of shape ``[length]``, cut off or filled
    up with `pad`, and a class number.

    Args:
        split: "train" or "validation": every tenth sample is for validation.
        length: tokens of a sample.
        tokenizer: as for :class:`Text`.
        num_labels: how many classes there are.
        file: a CSV file in UTF-8 whose first line is ``text,label``, in any order, maybe with other columns; classes
            are the labels in their order. None for pieces of Python's standard library, whose class is the package
            that they are from.
        pad: the token to fill up with.

    Raises:
        FileNotFoundError: there is no such file, or no tokenizer.
        ValueError: another split; the file has other columns, no rows, or another number of labels.
    """

    def __init__(
        self, split: Split, length: int, tokenizer: str, num_labels: int, file: str | None = None, pad: int = 0
    ) -> None:
        check_split(split)
        codec = find_codec(tokenizer)
        rows = _pieces(num_labels) if file is None else _rows(Path(file))
        self.labels = sorted({label for _, label in rows})
        if len(self.labels) != num_labels:
            shown = ", ".join(self.labels[:5]) + ", ..." * (len(self.labels) > 5)
            raise ValueError(
                f"{file or 'the standard library'} has {len(self.labels)} labels ({shown}), and num_labels is "
                f"{num_labels}; it must be their number"
            )
        chosen = [row for number, row in enumerate(rows) if _is_of(split, number)]
        if not chosen:
            raise ValueError(f"{file} has {len(rows)} rows, none of them for the {split} split; give at least 10")
        self._length, self._pad = length, pad
        self._samples = [(codec.encode(text)[:length], self.labels.index(label)) for text, label in chosen]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens, label = self._samples[index]
        rest = self._length - len(tokens)
        mask = [1] * len(tokens) + [0] * rest
        inputs = {
            "input_ids": torch.tensor([*tokens, *[self._pad] * rest]),
            "attention_mask": torch.tensor(mask),
        }
        return inputs, torch.tensor(label)


def _rows(file: Path) -> list[tuple[str, str]]:
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}; give a CSV file whose first line is text,label")
    reader = csv.DictReader(_read(file).splitlines(keepends=True))
    columns = reader.fieldnames or []
    if "text" not in columns or "label" not in columns:
        raise ValueError(f"{file} has the columns {', '.join(columns) or 'none'}; its first line must be text,label")
    return [(row["text"] or "", row["label"] or "") for row in reader]


def _pieces(num_labels: int) -> list[tuple[str, str]]:
    """Pieces of the packages of the standard library, and which package each is from."""
    root = Path(sysconfig.get_path("stdlib"))
    return [
        (text[start : start + _PIECE], package)
        for package in _PACKAGES[:num_labels]
        for file in sorted((root / package).glob("*.py"))
        for text in [file.read_text(encoding="utf-8", errors="replace")]
        for start in range(0, len(text), _PIECE)
    ]


class TextCodec(Protocol):
    """Turns text into token ids and back."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary: token ids are below it."""

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`."""

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`."""


class ByteCodec:
    """Each token is a byte of UTF-8."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")


class TokenizerCodec:
    """Tokens of a ``tokenizer.json``."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(file))
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


def find_codec(name: str) -> TextCodec:
    """The codec that `name` stands for.

    Args:
        name: "bytes", a ``tokenizer.json``, or a directory that has one.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the package ``tokenizers`` is missing.
        ValueError: the file is no tokenizer.
    """
    if name == BYTES:
        return ByteCodec()
    file = Path(name)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"there is no tokenizer {file}; give a tokenizer.json, its directory, or '{BYTES}'")
    try:
        return TokenizerCodec(file)
    except ImportError as error:
        raise ImportError("reading a tokenizer.json needs the package tokenizers: pip install tokenizers") from error
    except Exception as error:  # the package raises this for a file that is no tokenizer
        raise ValueError(f"{file} is not a tokenizer.json: {error}") from error
