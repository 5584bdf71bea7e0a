"""Guesses of a model's inputs from its first layer with parameters."""

from collections.abc import Iterator
from math import isqrt
from typing import Any

import torch
from torch import nn

from tensorshard.model.transformers_inputs import SAMPLES, TOKENS
from tensorshard.model.transformers_inputs import tokens as token_ids

_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d
_IMAGE_SIZES = (64, 224, 32)
_CHANNELS = (3, 1, 4)
_SIDES = (4, 7, 8, 14, 16)
_MOST_EXTRA_TOKENS = 5  # that a table of positions may have beside those of the patches, for a class and registers


def inputs_of_first_layer(model: nn.Module) -> list[Any]:
    """An embedding wants indices, a convolution images, a linear layer features or images that are cut into patches."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            tokens = token_ids(module.num_embeddings)
            return [tokens, (tokens, tokens)]
        if isinstance(module, _CONVOLUTIONS):
            return _convolved(model, module)
        if isinstance(module, nn.Linear):
            features = module.in_features
            sequences = torch.zeros(SAMPLES, TOKENS, features)
            plain = [torch.zeros(SAMPLES, features), sequences, (sequences, sequences)]
            return [*plain, *_images_of_patches(model, features)]
    return []


def convolved_inputs(model: nn.Module) -> list[torch.Tensor]:
    """What the model's first convolution may take, if that comes before its other layers; else nothing."""
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            return _convolved(model, module)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return []
    return []


def _convolved(model: nn.Module, layer: nn.Module) -> list[torch.Tensor]:
    assert isinstance(layer, _CONVOLUTIONS)
    if isinstance(layer, nn.Conv2d):
        sizes = [*_image_sizes(model), *((size, size) for size in _IMAGE_SIZES)]
    elif isinstance(layer, nn.Conv1d):
        sizes = [(64,), (1024,), (16384,)]  # type: ignore[list-item]
    else:
        sizes = [(length,) * 3 for length in (16, 32, 64)]  # type: ignore[misc]
    images = [torch.zeros(SAMPLES, layer.in_channels, *size) for size in dict.fromkeys(sizes)]
    if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1):
        images += _images_of_patches(model, layer.in_channels)
    return images


def _image_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """Image sizes that the model's attributes give."""
    found = []
    for name in ("image_size", "img_size", "image_shape", "input_size"):
        value = getattr(model, name, None)
        if isinstance(value, int):
            found.append((value, value))
        elif isinstance(value, tuple | list) and len(value) >= 2:
            found.append((value[-2], value[-1]))
    return found


def _images_of_patches(model: nn.Module, features: int) -> list[torch.Tensor]:
    """Square images of which a patch has `features` numbers. A table of positions gives the number of patches."""
    images: dict[tuple[int, int, int], None] = {}
    sides = [*dict.fromkeys(_sides_of_tables(model)), *_SIDES]
    for channels in _CHANNELS:
        patch = isqrt(features // channels)
        if patch < 2 or channels * patch * patch != features:
            continue
        images |= dict.fromkeys((channels, *size) for size in _image_sizes(model))
        images |= dict.fromkeys((channels, patch * side, patch * side) for side in sides)
        # Patches that overlap are more than the image's side over theirs.
        images |= dict.fromkeys((channels, size, size) for size in _IMAGE_SIZES)
    return [torch.zeros(SAMPLES, *shape) for shape in images]


def _sides_of_tables(model: nn.Module) -> Iterator[int]:
    """The square roots of the rows of the tables that the model and its parts hold, registered or not."""
    for module in model.modules():
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()]
        for table in held:
            if not isinstance(table, torch.Tensor) or table.ndim not in (2, 3) or (table.ndim == 3 and len(table) > 1):
                continue
            for extra in range(_MOST_EXTRA_TOKENS + 1):
                side = isqrt(max(0, table.shape[-2] - extra))
                if side > 1 and side * side == table.shape[-2] - extra:
                    yield side
