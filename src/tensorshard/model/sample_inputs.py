"""Small inputs to run a model with once: made, if the user gave none, or cut from a large batch."""

import inspect
from typing import Any

import torch
from torch import nn

from tensorshard.model.config_inputs import diffusers_inputs, transformers_inputs
from tensorshard.model.guessed_inputs import guesses_by_arguments, inputs_of_first_layer
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.torch_private.pytree import tree_map_only

_SAMPLES = 2
_POSITIONS = 12
# Batches with at most this many samples, and at most this many positions in all, stay as they are.
_FEW_SAMPLES = 8
_FEW_POSITIONS = 512


def example_inputs(model: nn.Module) -> list[Any]:
    """Candidates for inputs that `model` takes, the most likely first. The values are arbitrary.

    Models of transformers and diffusers say themselves what they take. For others, the first layer with parameters
    shows it: an embedding wants indices, a convolution images, a linear layer features or the patches of images. Then
    the names of the forward's arguments are tried. A model with a head that computes its loss takes targets as well,
    and may take masks. Numbers have the type of the model's first weight.
    """
    candidates = _candidates(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    typed: list[Any] = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, candidates)
    return typed


def _candidates(model: nn.Module) -> list[Any]:
    published = transformers_inputs(model) or diffusers_inputs(model)
    if any(getattr(module, "takes_targets", False) for module in model.modules()):
        main = [next(iter(inputs.values())) for inputs in published[:1]]
        return [given for inputs in [*main, *inputs_of_first_layer(model)] for given in _with_targets(model, inputs)]
    if published:
        return list(published)
    return [*inputs_of_first_layer(model), *guesses_by_arguments(model)]


def _with_targets(model: nn.Module, inputs: Any) -> list[Any]:
    """What a model may take whose last layer is its loss: its input, and small class indices, one a token or a sample.

    Required arguments that are called masks are ones.
    """
    if not isinstance(inputs, torch.Tensor):
        return []
    shape = inputs.shape if not inputs.is_floating_point() else inputs.shape[: 2 if inputs.ndim == 3 else 1]
    targets = [torch.zeros(size, dtype=torch.long) for size in dict.fromkeys((shape, inputs.shape[:1]))]
    accepted = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in accepted if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    masks = {name: torch.ones(shape, dtype=torch.long) for name in needed if "mask" in name}
    others = [name for name in needed if name not in masks]
    if masks and len(others) == 2:
        return [{**masks, others[0]: inputs, others[1]: classes} for classes in targets]
    return [(inputs, classes) for classes in targets]


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
