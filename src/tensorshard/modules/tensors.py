"""Tensors in nested structures, and which of them share memory."""

from typing import Any

import torch

from tensorshard.torch_private.pytree import tree_leaves
from tensorshard.torch_private.tensors import storage_address


def storage_key(tensor: torch.Tensor) -> int:
    """The same for a tensor and its views."""
    return storage_address(tensor.untyped_storage())


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
