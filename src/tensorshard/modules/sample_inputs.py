"""Small inputs to run a model with once, where nobody gave any."""

import inspect
from typing import Any

import torch
from torch import nn

from tensorshard.modules.argument_guesses import guesses_by_arguments

_SAMPLES = 2
_TOKENS = 6
_LARGEST_TOKEN = 100


def example_inputs(model: nn.Module) -> list[Any]:
    """Candidates for inputs that `model` takes, the likeliest first; the values are arbitrary.

    Hugging Face's models say themselves what they take. For others, the first layer with parameters shows it: an
    embedding wants indices, a convolution images, a linear layer features; then the names of the forward's arguments
    do. A model with a head that computes its loss takes targets as well, and may take masks.
    """
    published = _hugging_face_inputs(model)
    if any(getattr(module, "takes_targets", False) for module in model.modules()):
        main = [] if published is None else [next(iter(published.values()))]
        return [given for inputs in [*main, *_inputs_of_first_layer(model)] for given in _with_targets(model, inputs)]
    if published is not None:
        return [published]
    return [*_inputs_of_first_layer(model), *guesses_by_arguments(model)]


def _with_targets(model: nn.Module, inputs: Any) -> list[Any]:
    """What a model whose last layer is its loss may take: its input and the first classes, one a token or a sample.

    Arguments that it cannot do without and that are called masks are ones.
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


def _inputs_of_first_layer(model: nn.Module) -> list[Any]:
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            tokens = _tokens(module.num_embeddings)
            return [tokens, (tokens, tokens)]
        if isinstance(module, nn.Conv2d):
            sizes = [*_image_sizes(model), (64, 64), (224, 224), (32, 32)]
            return [torch.zeros(_SAMPLES, module.in_channels, *size) for size in sizes]
        if isinstance(module, nn.Conv1d):
            return [torch.zeros(_SAMPLES, module.in_channels, length) for length in (64, 1024, 16384)]
        if isinstance(module, nn.Conv3d):
            return [torch.zeros(_SAMPLES, module.in_channels, length, length, length) for length in (16, 32, 64)]
        if isinstance(module, nn.Linear):
            features = module.in_features
            sequences = torch.zeros(_SAMPLES, _TOKENS, features)
            return [torch.zeros(_SAMPLES, features), sequences, (sequences, sequences)]
    return []


def _hugging_face_inputs(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """By the documented attributes of ``transformers.PreTrainedModel``: its config and its main input's
    name."""
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or not isinstance(name, str):
        return None
    tokens = _tokens(getattr(config, "vocab_size", 2), special=_special_tokens(config))
    inputs: dict[str, Any] = {name: tokens}
    if name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        inputs[name] = torch.zeros(_SAMPLES, getattr(config, "num_channels", 3), height, width)
    accepted = inspect.signature(type(model).forward).parameters
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = tokens[:, :-1]
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs


def _tokens(vocabulary: int, special: frozenset[int] = frozenset()) -> torch.Tensor:
    """Tokens of a `vocabulary`, none of them `special` if there are others."""
    plain = [token for token in range(min(vocabulary, _LARGEST_TOKEN)) if token not in special] or [0]
    return torch.tensor([plain[5 * i % len(plain)] for i in range(_SAMPLES * _TOKENS)]).view(_SAMPLES, _TOKENS)


def _special_tokens(config: Any) -> frozenset[int]:
    """What begins, ends or pads a sequence, which models look for."""
    values = [value for key, value in vars(config).items() if key.endswith("_token_id")]
    return frozenset(value for value in values if isinstance(value, int))


def _image_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """Image sizes that the model's attributes speak of."""
    found = []
    for name in ("image_size", "img_size", "image_shape", "input_size"):
        value = getattr(model, name, None)
        if isinstance(value, int):
            found.append((value, value))
        elif isinstance(value, tuple | list) and len(value) >= 2:
            found.append((value[-2], value[-1]))
    return found
