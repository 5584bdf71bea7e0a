"""Results that are views in torch and copies here, and writes through them.

A slice of a sequence tensor mostly shares its memory, and a write reaches the whole. Two kinds of results do not: plain
tensors, which were fetched, and parts whose positions had to be moved. Writes to the former are carried over when the
sequence tensor is used next. Writes to the latter are refused.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tensorshard.context_parallel.exchanges import take
from tensorshard.context_parallel.rule_table import name_of, writes
from tensorshard.context_parallel.sequence_tensor import SequenceTensor
from tensorshard.torch_private.tensors import storage_owners, tensor_version

_OWN_REFERENCES = 2


def note_piece(x: SequenceTensor, index: Any, piece: torch.Tensor) -> torch.Tensor:
    """Remembers that `piece` stands for ``x[index]``. Returns it."""
    if isinstance(piece, torch.Tensor) and not isinstance(piece, SequenceTensor):
        if x._pieces is None:
            x._pieces = []
        x._pieces.append((index, piece, tensor_version(piece)))
    return piece


def note_copy(x: SequenceTensor, copy: Any) -> Any:
    """Remembers that `copy` would be a view of `x`. Returns it."""
    if isinstance(copy, SequenceTensor) and copy is not x:
        copy._copied_from = weakref.ref(x), x.version
    return copy


def before_use(x: SequenceTensor, func: Callable[..., Any]) -> None:
    """Carries over writes to plain tensors that are views of `x`; refuses what would write to a copy of a view.

    Raises:
        RuntimeError: `func` writes to a copy, or the tensor was written to since the copy was made.
    """
    if x._gathered is not None and tensor_version(x._gathered[0]) != x._gathered[2]:
        values, _, _ = x._gathered
        x.local.copy_(take(values, x.split_dim, x.sequence.index(x.group.rank)))
        x._gathered = values, x.version, tensor_version(values)
    if x._pieces is not None:
        _carry_over(x)
    if x._copied_from is not None:
        _check_copy(x, name_of(func))


def _carry_over(x: SequenceTensor) -> None:
    pieces, x._pieces = x._pieces, None
    kept = []
    while pieces:
        index, piece, version = pieces.pop(0)
        if tensor_version(piece) != version:
            x[index] = piece
        elif sys.getrefcount(piece) <= _OWN_REFERENCES and storage_owners(piece) == 1:
            continue  # nobody else can write to it
        kept.append((index, piece, tensor_version(piece)))
    x._pieces = kept or None


def _check_copy(x: SequenceTensor, name: str) -> None:
    reference, version = x._copied_from
    source = reference()
    if source is None or (source.version == version and not writes(name)):
        return
    raise RuntimeError(
        f"{name} uses a slice or a reshape of a sequence whose positions are on several ranks. It is a copy here, and a "
        "view without context parallelism, so that a write to one would have to reach the other. Use x[...] = value, or "
        "write into a clone"
    )
