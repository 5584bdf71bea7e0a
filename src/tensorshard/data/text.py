"""Datasets of text that is turned into tokens when they are made: windows to continue, and samples with a label."""

import csv
import glob
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tensorshard.data.stdlib_text import Split, check_split, read_sources
from tensorshard.data.text_codec import find_codec
from tensorshard.data.token_dataset import TokenDataset

# So much of the standard library is turned into tokens, which takes some seconds.
_STDLIB_BYTES = 1 << 20
# One part or row in this many is for validation.
_VALIDATION_EVERY = 10
_PART = 4096
_PIECE = 400
_PACKAGES = ("asyncio", "email", "unittest", "multiprocessing", "importlib", "http", "xml", "ctypes", "json", "logging")


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
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise FileNotFoundError(f"there is no text file {pattern}; give paths or patterns of text files in UTF-8")
        for file in found:
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
