"""Explains torch's and Python's short errors about a batch that does not fit the model or the loss.

This happens only after an error, so a batch that fits costs nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.model.model_errors import describe_batch, failed_module
from tensorshard.torch_private.pytree import tree_tensors

_FLOATING_TARGETS = (
    "expected scalar type Long",
    "expected target of type Long",
    "expected target dtype",
    "not implemented for 'Float'",
)


class OutOfRangeError(IndexError):
    """A batch has token ids or class numbers that the model does not have."""


@contextmanager
def explained_loss(output: Any, targets: Any) -> Iterator[None]:
    """A context for a call of a loss function.

    Raises:
        OutOfRangeError, RuntimeError: the targets are the cause; the message says so, in place of torch's.
        Exception: any other error, with a note of what the loss function was called with.
    """
    try:
        yield
    except Exception as error:
        tensors = tree_tensors(targets)
        text = str(error)
        integers = [t for t in tensors if not t.is_floating_point() and t.numel()]
        if isinstance(error, IndexError) and "out of bounds" in text and integers:
            shapes = ", ".join(str(list(t.shape)) for t in tree_tensors(output))
            raise OutOfRangeError(
                f"the targets of this batch do not fit the loss: {text} They are {_ranges(integers)}, for an output of "
                f"shape {shapes}: class numbers are 0 to the number of classes minus 1, or the loss's ignore_index"
            ) from error
        floating = [t for t in tensors if t.is_floating_point()]
        if isinstance(error, RuntimeError) and floating and any(sign in text for sign in _FLOATING_TARGETS):
            raise RuntimeError(
                f"the targets of this batch do not fit the loss: {text.splitlines()[0]}. They are {floating[0].dtype} "
                f"of shape {list(floating[0].shape)}: class numbers are int64 (targets.long())"
            ) from error
        error.add_note(
            f"loss_fn was called with an output of {describe_batch(output)} and targets of {describe_batch(targets)}"
        )
        raise


@contextmanager
def explained_forward(model: nn.Module, inputs: Any) -> Iterator[None]:
    """A context for a forward of `model`.

    Raises:
        OutOfRangeError: an embedding has too few rows for the inputs.
        Exception: any other error, with a note of the inputs.
    """
    try:
        yield
    except Exception as error:
        sentence = _missing_rows(error, model, inputs)
        if sentence is not None:
            raise OutOfRangeError(sentence) from error
        note_inputs(error, model, inputs)
        raise


def note_inputs(error: BaseException, model: nn.Module, inputs: Any) -> None:
    """Adds a note to an `error` of a forward: which module raised it on which rank, what the inputs were and, if known,
    what is wrong with them."""
    sentence = _missing_rows(error, model, inputs)
    called = f"{type(model).__name__} was called with inputs of {describe_batch(inputs)}"
    error.add_note(sentence or f"{called}{_on_rank()}{failed_module(error, model)}")
    if any(tensor.dim() and not tensor.size(0) for tensor in tree_tensors(inputs)):
        error.add_note(
            "this rank has no sample of the batch, and the model does not run without one: engine.step runs one in its "
            "place, and engine.loader(drop_last=True) leaves an epoch's last, smaller batch out"
        )


def _on_rank() -> str:
    return f" on rank {dist.get_rank()}" if dist.is_initialized() and dist.get_world_size() > 1 else ""


def _missing_rows(error: BaseException, model: nn.Module, inputs: Any) -> str | None:
    """What is wrong with `inputs`, if the `error` is that an embedding has too few rows; None for other errors."""
    if not isinstance(error, IndexError) or "index out of range" not in str(error):
        return None
    integers = [t for t in tree_tensors(inputs) if not t.is_floating_point() and t.numel()]
    largest = max((int(t.max()) for t in integers), default=0)
    least = min((int(t.min()) for t in integers), default=0)
    tables = {n: m.num_embeddings for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    small = {name: rows for name, rows in tables.items() if least < 0 or largest >= rows}
    if not small:
        return None
    listing = ", ".join(f"{name} has {rows} rows" for name, rows in small.items())
    return (
        f"an embedding of the model was asked for a row that it does not have: the integer inputs of this batch "
        f"are {_ranges(integers)}; of the embeddings, {listing}. Tokens must be within the vocabulary "
        f"that the model was built for"
    )


def _ranges(tensors: list[torch.Tensor]) -> str:
    return " and ".join(f"{int(t.min())} to {int(t.max())}" for t in tensors)
