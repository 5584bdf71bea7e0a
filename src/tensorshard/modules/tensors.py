"""Tensors in nested structures, and which of them share memory."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def storage_key(tensor: torch.Tensor) -> int:
    """The same for a tensor and its views."""
    return tensor.untyped_storage()._cdata


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
