"""Small inputs to run a model with once, if the user gave none."""

import inspect
from typing import Any

import torch
from torch import nn

from tensorshard.model.argument_guesses import guesses_by_arguments
from tensorshard.model.diffusers_inputs import diffusers_inputs
from tensorshard.model.layer_guesses import inputs_of_first_layer
from tensorshard.model.transformers_inputs import transformers_inputs
from tensorshard.torch_private.pytree import tree_map_only


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
