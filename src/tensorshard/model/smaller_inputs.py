"""A small batch in place of a large one, for runs whose values do not matter."""

from typing import Any

import torch

from tensorshard.model.tensors import map_tensors_once, tensor_leaves

_SAMPLES = 2
_POSITIONS = 12
# Batches with at most this many samples, and at most this many positions in all, stay as they are.
_FEW_SAMPLES = 8
_FEW_POSITIONS = 512


def smaller_inputs(inputs: Any, size: int) -> Any | None:
    """The first samples of `inputs`, and the first positions of sequences; None where that would save little.

    Sequences are token ids [samples, positions] or features [samples, positions, channels], all equally long. If their
    length is divisible by `size`, they are cut to another length that is.

    Args:
        inputs: as for ``Engine.step``.
    """
    leaves = [leaf for leaf in tensor_leaves(inputs) if leaf.ndim]
    if len({leaf.shape[0] for leaf in leaves}) != 1:  # samples may be along another dimension
        return None
    samples, positions = leaves[0].shape[0], _positions(leaves)
    kept = positions
    if positions is not None and positions % size == 0 and samples * positions > _FEW_POSITIONS:
        kept = min(positions, -(-_POSITIONS // size) * size)
    if kept == positions and samples <= _FEW_SAMPLES:
        return None

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.ndim == 0:
            return leaf
        first = leaf[:_SAMPLES]
        return first if kept is None else first[:, :kept]

    return map_tensors_once(cut, inputs)


def _positions(leaves: list[torch.Tensor]) -> int | None:
    """The length of the sequences in `leaves`; None if they are not sequences, or have different lengths."""
    if any(leaf.ndim != (3 if leaf.is_floating_point() else 2) for leaf in leaves):
        return None
    lengths = {leaf.shape[1] for leaf in leaves}
    return lengths.pop() if len(lengths) == 1 else None
