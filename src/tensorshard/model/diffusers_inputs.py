"""Inputs for diffusers' models, made from their configs: noisy samples, timesteps, and conditions."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_SAMPLES = 2
_FRAMES = 2
_LENGTH = 64  # of one-dimensional signals
_TOKENS = 6
_MAIN = ("sample", "hidden_states")
_WIDTHS_OF_TEXT = (
    "encoder_hid_dim",
    "caption_channels",
    "text_embed_dim",
    "joint_attention_dim",
    "cross_attention_dim",
    "embedding_dim",
)

Inputs = dict[str, torch.Tensor]


def diffusers_inputs(model: nn.Module) -> list[Inputs]:
    """Candidates for keyword arguments of `model`, the most likely first; [] if it is not from diffusers.

    The sizes come from its ``config``, a mapping, and the names from its forward. The values are arbitrary.
    """
    config = getattr(model, "config", None)
    accepted = inspect.signature(type(model).forward).parameters
    main = next((name for name in _MAIN if name in accepted), None)
    if not isinstance(config, Mapping) or main is None:
        return []
    beside = {name: value for name in accepted if (value := _conditioning(config, name)) is not None}
    needed = {name for name, parameter in accepted.items() if parameter.default is parameter.empty} - {"self", main}
    if not all(name in beside for name in needed if accepted[name].kind is not inspect.Parameter.VAR_KEYWORD):
        return []
    first = next((m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    return [{main: torch.zeros(_SAMPLES, *shape), **beside} for shape in _sample_shapes(config, first)]


def _sample_shapes(config: Mapping[str, Any], first: nn.Module | None) -> Iterator[tuple[int, ...]]:
    """Shapes of one sample for a model whose first convolution is `first`."""
    channels = config.get("in_channels")
    if channels is None:
        if config.get("embedding_dim") is not None:  # a prior, which denoises an embedding
            yield (config["embedding_dim"],)
    elif isinstance(first, nn.Conv1d):
        yield channels, _LENGTH
    elif "sample_frames" in config:  # a transformer for videos, whose latents have frames first
        yield _FRAMES, channels, *_sizes(config)
    else:
        yield channels, *_sizes(config)
        yield channels, _FRAMES, *_sizes(config)


def _sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    size = config.get("sample_size")
    if isinstance(size, tuple | list):
        return size[-2], size[-1]
    height = config.get("sample_height") or size or 32
    return height, config.get("sample_width") or size or 32


def _conditioning(config: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """A value for the argument `name`; None if it is optional."""
    if name in ("timestep", "timesteps"):
        return torch.ones(_SAMPLES, dtype=torch.long)
    if name == "encoder_hidden_states":
        width = next((config[key] for key in _WIDTHS_OF_TEXT if isinstance(config.get(key), int)), None)
        length = config.get("max_text_seq_length") or config.get("num_embeddings") or _TOKENS
        return None if width is None else torch.zeros(_SAMPLES, length, width)
    if name == "class_labels":
        classes = config.get("num_embeds_ada_norm") or config.get("num_class_embeds")
        return torch.zeros(_SAMPLES, dtype=torch.long) if classes else None
    width = {
        "pooled_projections": config.get("pooled_projection_dim"),
        "proj_embedding": config.get("embedding_dim"),
    }.get(name)
    return None if width is None else torch.zeros(_SAMPLES, width)
