"""Nested structures of tensors: taking them apart, mapping over them, and building them again.

Why: batches, arguments and outputs of models are tuples, lists and dicts of tensors, or of classes that
``transformers`` registers in torch's own registry, which another library would not know.

Checked: torch 2.13 and 2.15, for `TreeSpec`, `tree_flatten`, `tree_leaves`, `tree_map`, `tree_map_only` and
`tree_unflatten`.

Public way: none in these versions. The ``optree`` package has the same functions; classes registered with torch would
have to be registered there once more.
"""

from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_tensors", "tree_unflatten"]


def tree_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of `tree`.

    Why: as for `tree_leaves`.

    Checked: torch 2.13 and 2.15.

    Public way: as for `tree_leaves`.
    """
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def spec_as_tuples(spec: TreeSpec) -> Any:
    """`spec` in plain tuples: None for a leaf, else its type, its context and its children.

    Why: torch 2.13 warns about a deprecated class of its own whenever a spec is unpickled. Users can do nothing about
    it, since tensorshard sends the specs.

    Checked: torch 2.13 and 2.15.

    Public way: none; ``treespec_dumps`` is as private, and knows fewer types.
    """
    return None if spec.is_leaf() else (spec.type, spec.context, tuple(map(spec_as_tuples, spec.children())))


def spec_from_tuples(tuples: Any) -> TreeSpec:
    """The inverse of :func:`spec_as_tuples`.

    Why: as for that function.

    Checked: torch 2.13 and 2.15.

    Public way: as for that function.
    """
    if tuples is None:
        return tree_flatten(0)[1]
    kind, context, children = tuples
    return TreeSpec(kind, context, [spec_from_tuples(child) for child in children])
