"""Guesses of what a forward takes, from its arguments' names and the layers that the model has.

They are tried one after the other on fake tensors until one runs, so that a wrong guess costs time and nothing else.
"""

import inspect
import re
from collections.abc import Iterator
from itertools import islice, pairwise

import torch
from torch import nn

from tensorshard.model.layer_guesses import convolved_inputs

_SAMPLES = 2
_STEPS = 6
_MOST_GUESSES = 48

_INDICES = re.compile(
    r"(^|_)(ids?|idx|index|indices|tokens?|categor\w*|sparse|users?|items?|words?|labels?|src|tgt)($|_)"
)
_MASKS = re.compile(r"mask|padding")
_TIMES = re.compile(r"^(t|times?|timesteps?|noise_level|sigmas?)$")
_GRAPHS = re.compile(r"adj|edge|graph")
_POINTS = re.compile(r"pos(ition)?s?$|dir(ection)?s?$|coord|points?|xyz|rays?")


def guesses_by_arguments(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Keyword arguments that the forward of `model` may take, the most likely first. Optional ones are left out.

    The values are arbitrary. The first dimension of each tensor is samples.
    """
    needed = _needed(model)
    if not needed:
        return []
    options = [list(_options(model, name)) for name in needed]
    if not all(options):
        return []
    last = [len(each) - 1 for each in options]
    # First the first options of all arguments; then combinations with one second option; and so on.
    chosen = (places for total in range(sum(last) + 1) for places in _adding_up(total, last))
    return [
        {name: each[place] for name, each, place in zip(needed, options, places, strict=True)}
        for places in islice(chosen, _MOST_GUESSES)
    ]


def _adding_up(total: int, last: list[int]) -> Iterator[tuple[int, ...]]:
    """Combinations of numbers from 0 to each of `last` that add up to `total`, made one by one since there are many."""
    if total > sum(last):
        return
    if not last:
        yield ()
        return
    for first in range(min(total, last[0]) + 1):
        yield from ((first, *rest) for rest in _adding_up(total - first, last[1:]))


def _needed(model: nn.Module) -> list[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = inspect.signature(model.forward).parameters.values()
    return [p.name for p in accepted if p.default is p.empty and p.kind in by_name]


def _options(model: nn.Module, name: str) -> Iterator[torch.Tensor]:
    if _MASKS.search(name):
        yield torch.ones(_SAMPLES, _STEPS, dtype=torch.bool)
    elif _TIMES.search(name):
        yield torch.ones(_SAMPLES, dtype=torch.long)
        yield torch.full((_SAMPLES,), 0.5)
        yield torch.full((_SAMPLES, 1), 0.5)
    elif _GRAPHS.search(name):
        yield torch.ones(_SAMPLES, _STEPS, _STEPS)
        yield torch.ones(_SAMPLES, _SAMPLES)
    elif _INDICES.search(name):
        yield from _indices(model)
        yield from _numbers(model)
    elif _POINTS.search(name):
        yield torch.zeros(_SAMPLES, 3)
        yield torch.zeros(_SAMPLES, _STEPS, 3)
        yield from _numbers(model)
    else:
        yield from convolved_inputs(model)
        yield from _numbers(model)
        yield from _indices(model)


def _indices(model: nn.Module) -> Iterator[torch.Tensor]:
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if not tables:
        return
    most = min(table.num_embeddings for table in tables)
    shapes = [(_SAMPLES, _STEPS), (_SAMPLES, len(tables)), (_SAMPLES,)]
    shapes += [(_SAMPLES, fields) for fields in _fields(model, tables[0].embedding_dim)]
    for shape in dict.fromkeys(shapes):
        yield torch.arange(torch.Size(shape).numel()).remainder_(most).view(shape)


def _fields(model: nn.Module, width: int) -> Iterator[int]:
    """How many embedding rows of `width` fill a linear layer's input, alone or beside the first layer's features."""
    inputs = [m.in_features for m in model.modules() if isinstance(m, nn.Linear)]
    for features in inputs:
        for beside in (0, inputs[0]):
            count, rest = divmod(features - beside, width)
            if count > 1 and not rest:
                yield count


def _numbers(model: nn.Module) -> Iterator[torch.Tensor]:
    """Features that the linear layers take, those of the first layer first, as vectors and as sequences."""
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    widths = list(dict.fromkeys(layer.in_features for layer in linear))[:3]
    shapes = [shape for width in widths for shape in ((_SAMPLES, width), (_SAMPLES, _STEPS, width))]
    if linear:
        first = linear[0].in_features
        shapes.append((_SAMPLES, 2 * first))  # the layer may take one half of it
        for layer, later in pairwise(linear):
            steps, rest = divmod(later.in_features, layer.out_features)
            if steps > 1 and not rest:  # the layer may take the features of all steps at once
                shapes.append((_SAMPLES, steps, first))
    yield from (torch.zeros(shape) for shape in dict.fromkeys(shapes))
