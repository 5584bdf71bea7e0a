"""Putting together what the ranks of a parallel layer hold."""

import torch

from tensorshard.comm.sharded_tensors import gather_full
from tensorshard.layers.parallel_module import layout_of


def full(tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> torch.Tensor:
    """All of a parameter, or of what is cut as `parameter` is, on every rank. A collective where it is split."""
    return gather_full(tensor.detach(), layout_of(tensor if parameter is None else parameter))
