"""Nested structures of tensors: taking them apart, mapping over them, and putting them together again.

Why: batches, arguments and outputs of models are tuples, lists and dicts of tensors, also of the classes that
``transformers`` registers with torch's own registry, which another library would not know.

Checked: torch 2.11 and 2.13, for `TreeSpec`, `tree_flatten`, `tree_leaves`, `tree_map`, `tree_map_only` and
`tree_unflatten`.

Public way: none in these versions. The ``optree`` package has the same functions; classes registered with torch would
have to be registered there once more.
"""

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
