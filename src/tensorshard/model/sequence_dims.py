"""Which dimension of an input is its sequence."""

from collections.abc import Mapping
from typing import Any

import torch

from tensorshard.torch_private.pytree import tree_leaves


def first_sequence(named: Mapping[str, Any]) -> tuple[torch.Tensor, int] | None:
    """The first input with samples and positions, and the dimension of its sequence.

    Token ids and embeddings have it in their second dimension. An image has it in its third one, its rows.
    """
    for value in named.values():
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2:
                dim = 1 if leaf.dim() < 4 else 2
                if leaf.shape[dim] > 1:
                    return leaf, dim
    return None


def sequence_dim(leaf: Any, first: torch.Tensor, dim: int, *, shortest: int) -> int | None:
    """Which dimension of an input is a sequence, if any.

    It is the first dimension after the samples that is as long as the sequence of `first`. What looks as `first` does,
    or holds token ids, may be another sequence, such as a decoder's.

    Args:
        first: the first input that has a sequence, in its dimension `dim`.
        shortest: another sequence has this length at least.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
        return None
    for candidate in range(1, leaf.dim()):
        if leaf.shape[candidate] == first.shape[dim]:
            return candidate
    if (leaf.dim(), leaf.dtype) == (first.dim(), first.dtype):
        other = dim
    elif leaf.dim() == 2 and leaf.dtype in (torch.int64, torch.int32):
        other = 1
    else:
        return None
    return other if leaf.shape[other] >= shortest else None
