"""Batches of which each rank is given its own positions alone: samples are cut before they are put together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from tensorshard.context_parallel.layouts import contiguous, zigzag
from tensorshard.context_parallel.sequence_layout import SequenceLayout
from tensorshard.model.sequence_dims import first_sequence, sequence_dim
from tensorshard.torch_private.pytree import tree_flatten, tree_unflatten

Place = tuple[int, int]
"""The dimension of a batch's tensor that was cut, and how long it was."""


def layout_of(length: int, size: int, order: str) -> SequenceLayout:
    """Which rank holds which positions of a sequence.

    Args:
        order: of the positions; "zigzag" where the sequence is long enough for it.
    """
    return (zigzag if order == "zigzag" and length >= 4 * size else contiguous)(length, size)


@dataclass(frozen=True)
class CutSamples:
    """Puts samples together as ``default_collate`` does, each without the positions of other ranks.

    An array or tensor of a sample that is read lazily, such as a memory-mapped one, is read only where this rank has
    positions.

    Args:
        rank, size: this rank, and how many share sequences.
        order: of the positions.
    """

    rank: int
    size: int
    order: str

    def __call__(self, samples: Sequence[Any]) -> tuple[Any, list[Place | None]]:
        """The batch of this rank's positions, and for each of its tensors where it was cut.

        Raises:
            ValueError: samples have sequences of different lengths, or none.
        """
        cut, places = zip(*map(self._cut, samples), strict=True)
        if any(each != places[0] for each in places):
            lengths = sorted({place[1] for each in places for place in each if place is not None})
            raise ValueError(
                f"cut_sequences=True was given, and a batch has sequences of {' and '.join(map(str, lengths))} "
                f"positions, of which no equal parts can be put together; let the dataset pad or cut them to one length"
            )
        return default_collate(list(cut)), list(places[0])

    def _cut(self, sample: Any) -> tuple[Any, list[Place | None]]:
        leaves, structure = tree_flatten(sample)
        shapes = [torch.empty(1, *leaf.shape, dtype=_dtype(leaf), device="meta") if _is_array(leaf) else leaf
                  for leaf in leaves]  # fmt: skip
        first = first_sequence({"": shapes})
        places: list[Place | None] = []
        for number, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
            dim = None if first is None else sequence_dim(shape, *first, shortest=2 * self.size)
            if dim is None or shape.shape[dim] < 2 * self.size:
                places.append(None)
                continue
            places.append((dim, shape.shape[dim]))
            runs = layout_of(shape.shape[dim], self.size, self.order).runs[self.rank]
            parts = [leaf[(slice(None),) * (dim - 1) + (slice(int(start), int(stop)),)] for start, stop in runs]
            leaves[number] = torch.cat([torch.as_tensor(np.array(part)) if isinstance(part, np.ndarray) else part
                                        for part in parts], dim - 1)  # fmt: skip
        if not any(places):
            raise ValueError(
                f"cut_sequences=True was given, but no tensor of a sample has a sequence of at least {2 * self.size} "
                f"positions; give tensors or arrays, such as token ids of shape [positions], or leave cut_sequences out"
            )
        return tree_unflatten(leaves, structure), places


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray)


def _dtype(leaf: Any) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, torch.Tensor) else torch.as_tensor(np.empty(0, leaf.dtype)).dtype
