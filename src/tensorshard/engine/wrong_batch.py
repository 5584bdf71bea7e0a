"""What torch says in few words about a batch that does not fit the model or the loss, said in full.

Only errors are looked at, so that batches that fit cost nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tensorshard.torch_private.pytree import tree_leaves

_FLOATING_TARGETS = (
    "expected scalar type Long",
    "expected target of type Long",
    "expected target dtype",
    "not implemented for 'Float'",
)


@contextmanager
def explained_loss(output: Any, targets: Any) -> Iterator[None]:
    """Surrounds a call of a loss function.

    Raises:
        IndexError, RuntimeError: torch's own, with a sentence about the targets in place of torch's where they are why.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        found = _tensors(targets)
        text = str(error)
        integers = [t for t in found if not t.is_floating_point() and t.numel()]
        if isinstance(error, IndexError) and "out of bounds" in text and integers:
            shapes = ", ".join(str(list(t.shape)) for t in _tensors(output))
            raise IndexError(
                f"the targets of this batch do not fit the loss: {text} They are {_ranges(integers)}, for an output of "
                f"shape {shapes}: class numbers are 0 to the number of classes minus 1, or the loss's ignore_index"
            ) from error
        floating = [t for t in found if t.is_floating_point()]
        if floating and any(sign in text for sign in _FLOATING_TARGETS):
            raise RuntimeError(
                f"the targets of this batch do not fit the loss: {text.splitlines()[0]}. They are {floating[0].dtype} "
                f"of shape {list(floating[0].shape)}: class numbers are int64 (targets.long())"
            ) from error
        raise


@contextmanager
def explained_forward(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Surrounds a forward of `model`.

    Raises:
        IndexError: torch's own, with a sentence about the inputs in its place where an embedding has too few rows.
    """
    try:
        yield
    except IndexError as error:
        integers = [t for t in _tensors(inputs) if not t.is_floating_point() and t.numel()]
        largest = max((int(t.max()) for t in integers), default=0)
        least = min((int(t.min()) for t in integers), default=0)
        tables = {n: m.num_embeddings for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
        small = {name: rows for name, rows in tables.items() if least < 0 or largest >= rows}
        if "index out of range" not in str(error) or not small:
            raise
        listing = ", ".join(f"{name} has {rows}" for name, rows in small.items())
        raise IndexError(
            f"an embedding of the model was asked for a row that it does not have: the integer inputs of this batch "
            f"are {_ranges(integers)}; of the embeddings, {listing} rows. Tokens must be within the vocabulary "
            f"that the model was built for"
        ) from error


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _ranges(tensors: list[torch.Tensor]) -> str:
    return " and ".join(f"{int(t.min())} to {int(t.max())}" for t in tensors)
