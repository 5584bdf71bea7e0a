"""Results that are views in torch and copies here, and writes through them.

A slice of a sequence tensor mostly shares its memory, and a write reaches the whole. Two kinds of results do not: plain
tensors, which were fetched, and parts whose positions had to be moved. Writes to the former are carried over when the
sequence tensor is used next. Writes to the latter are refused.
"""

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensorshard.context_parallel.context_group import ContextGroup
from tensorshard.context_parallel.exchanges import take
from tensorshard.context_parallel.rule_table import name_of, writes
from tensorshard.context_parallel.sequence_tensor import SequenceTensor
from tensorshard.torch_private.tensors import storage_owners, tensor_version

_OWN_REFERENCES = 2


@dataclass
class _Piece:
    """A plain tensor that stands for ``source[index]``."""

    source: SequenceTensor
    index: Any
    tensor: torch.Tensor
    version: int


def note_piece(x: SequenceTensor, index: Any, piece: Any) -> Any:
    """Remembers that `piece` stands for ``x[index]``, while somebody has it. Returns it."""
    if isinstance(piece, torch.Tensor) and not isinstance(piece, SequenceTensor):
        if x.group.pieces:
            _carry_over(x.group)
        x.group.pieces.append(_Piece(x, index, piece, tensor_version(piece)))
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
    if x.group.pieces:
        _carry_over(x.group)
    if x._copied_from is not None:
        _check_copy(x, name_of(func))


def _carry_over(group: ContextGroup) -> None:
    pieces: list[_Piece] = group.pieces
    group.pieces = []
    kept = []
    for each in pieces:
        if tensor_version(each.tensor) != each.version:
            each.source[each.index] = each.tensor
            each.version = tensor_version(each.tensor)
        if sys.getrefcount(each.tensor) > _OWN_REFERENCES or storage_owners(each.tensor) > 1:
            kept.append(each)  # somebody may still write to it
    group.pieces = kept


def _check_copy(x: SequenceTensor, name: str) -> None:
    reference, version = x._copied_from
    source = reference()
    if source is None or (source.version == version and not writes(name)):
        return
    raise RuntimeError(
        f"{name} uses a slice or a reshape of a sequence whose positions are on several ranks. It is a copy here, and "
        "a view without context parallelism, so that a write to one would have to reach the other. Use x[...] = value, "
        "or write into a clone"
    )
