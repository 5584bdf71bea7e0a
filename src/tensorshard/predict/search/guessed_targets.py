"""Guesses targets for a search without any: of a shape and type that the loss takes on fake tensors."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.tensors import map_tensors, tensor_leaves
from tensorshard.predict.search.model_facts import model_facts
from tensorshard.torch_private.fake_results import QuickFakeTensorMode


def guess_targets(
    model: nn.Module | Callable[[], nn.Module], loss_fn: Callable[[Any, Any], Any], inputs: Any, samples: int
) -> Any:
    """Zeros that ``loss_fn(model(inputs), targets)`` takes: classes, values like the output's, or the inputs.

    Args:
        inputs: a batch of `samples`.

    Raises:
        ValueError: the loss takes none of these.
    """
    facts = model_facts(model, inputs, samples)
    outputs = [] if facts is None else tensor_leaves(facts.output)
    if facts is not None and outputs:
        candidates = [torch.zeros(shape, dtype=dtype) for shape, dtype in _shapes(outputs[0])]
        for targets in (*candidates, inputs):
            if _is_taken(loss_fn, facts.output, targets):
                return targets
    raise ValueError(
        "sample_targets were not given, and could not be guessed: the loss takes neither classes nor values like the "
        "model's output nor its inputs; give sample_targets=, of one batch as Engine.step is given them"
    )


def _shapes(output: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    shape = tuple(output.shape)
    if output.dim() > 1 and shape[-1] > 1:
        yield shape[:-1], torch.long  # a class for each place
    if output.dim() > 2:
        yield (shape[0], *shape[2:]), torch.long  # channels come second, as in segmentation
    yield shape, torch.float32


def _is_taken(loss_fn: Callable[[Any, Any], Any], output: Any, targets: Any) -> bool:
    with QuickFakeTensorMode(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # such as the warning about shapes that are broadcast
        try:
            fakes = [map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype), tree) for tree in (output, targets)]
            loss_fn(*fakes)
        except Exception as error:  # a loss may raise anything for targets that do not suit it
            if isinstance(error, Warning) or raised_by_model(error):
                return False
            raise
    return True
