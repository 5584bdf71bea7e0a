"""Inputs for the models of transformers and diffusers, made from their configs."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

SAMPLES = 2
TOKENS = 6
_LARGEST_TOKEN = 100
_WAVEFORM = 4000
_PARTS = ("text_config", "vision_config", "audio_config")
_FRAMES = 2
_LENGTH = 64  # of one-dimensional signals
_MAIN = ("sample", "hidden_states")
_WIDTHS_OF_TEXT = (
    "encoder_hid_dim",
    "caption_channels",
    "text_embed_dim",
    "joint_attention_dim",
    "cross_attention_dim",
    "embedding_dim",
)

Inputs = dict[str, Any]


def transformers_inputs(model: nn.Module) -> list[Inputs]:
    """Candidates for keyword arguments of `model`, the most likely first; [] if it is not from transformers.

    They follow from its documented attributes ``config`` and ``main_input_name``. The values are arbitrary.
    """
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or not isinstance(main, str):
        return []
    accepted = inspect.signature(type(model).forward).parameters
    beside: Inputs = {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        beside["decoder_input_ids"] = _token_ids(config)[:, :-1]
    if "use_cache" in accepted:
        beside["use_cache"] = False
    candidates = []
    for value in _values(config, main):
        candidates.append({main: value, **beside})
        if main == "input_ids" and "pixel_values" in accepted and _look_up(config, "image_size") is not None:
            candidates.append({main: value, "pixel_values": _image(config), **beside})
    if main == "states":  # a decision transformer, with earlier actions and rewards
        candidates.insert(0, _decisions(config))
    return candidates


def tokens(vocabulary: int, special: frozenset[int] = frozenset()) -> torch.Tensor:
    """Tokens of a `vocabulary`, none of them `special` if there are others."""
    plain = [token for token in range(min(vocabulary, _LARGEST_TOKEN)) if token not in special] or [0]
    return torch.tensor([plain[5 * i % len(plain)] for i in range(SAMPLES * TOKENS)]).view(SAMPLES, TOKENS)


def _values(config: Any, main: str) -> Iterator[torch.Tensor]:
    """Candidates for the main input."""
    if main == "pixel_values":
        yield _image(config)
    elif main == "input_values":  # a spectrogram, or a waveform
        bins, length = _look_up(config, "num_mel_bins"), _look_up(config, "max_length")
        if bins is not None and length is not None:
            yield torch.zeros(SAMPLES, length, bins)
        yield torch.zeros(SAMPLES, _WAVEFORM)
    elif main == "input_features":
        bins, positions = _look_up(config, "num_mel_bins"), _look_up(config, "max_source_positions")
        if bins is not None and positions is not None:
            yield torch.zeros(SAMPLES, bins, 2 * positions)  # a convolution of stride 2 comes first
        yield torch.zeros(SAMPLES, TOKENS, _look_up(config, "num_mel_bins", "input_dim", "hidden_size") or 80)
    elif main == "past_values":
        length, channels = _look_up(config, "context_length"), _look_up(config, "num_input_channels", "input_size")
        yield torch.zeros(SAMPLES, length or TOKENS, channels or 1)
    else:
        yield _token_ids(config)


def _decisions(config: Any) -> Inputs:
    return {
        "states": torch.zeros(SAMPLES, TOKENS, config.state_dim),
        "actions": torch.zeros(SAMPLES, TOKENS, config.act_dim),
        "rewards": torch.zeros(SAMPLES, TOKENS, 1),
        "returns_to_go": torch.zeros(SAMPLES, TOKENS, 1),
        "timesteps": torch.arange(TOKENS).expand(SAMPLES, -1).contiguous(),
        "attention_mask": torch.ones(SAMPLES, TOKENS, dtype=torch.long),
    }


def _image(config: Any) -> torch.Tensor:
    size = _look_up(config, "image_size")
    size = 224 if size is None else size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.zeros(SAMPLES, _look_up(config, "num_channels") or 3, height, width)


def _token_ids(config: Any) -> torch.Tensor:
    values = [value for part in _parts(config) for key, value in vars(part).items() if key.endswith("_token_id")]
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return tokens(_look_up(config, "vocab_size") or 2, frozenset(each for each in flat if isinstance(each, int)))


def _look_up(config: Any, *names: str) -> Any:
    """The first of `names` that the config or one of its parts has."""
    for name in names:
        for part in _parts(config):
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _parts(config: Any) -> list[Any]:
    return [config, *(part for name in _PARTS if (part := getattr(config, name, None)) is not None)]


def diffusers_inputs(model: nn.Module) -> list[dict[str, torch.Tensor]]:
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
    return [{main: torch.zeros(SAMPLES, *shape), **beside} for shape in _sample_shapes(config, first)]


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
        return torch.ones(SAMPLES, dtype=torch.long)
    if name == "encoder_hidden_states":
        width = next((config[key] for key in _WIDTHS_OF_TEXT if isinstance(config.get(key), int)), None)
        length = config.get("max_text_seq_length") or config.get("num_embeddings") or TOKENS
        return None if width is None else torch.zeros(SAMPLES, length, width)
    if name == "class_labels":
        classes = config.get("num_embeds_ada_norm") or config.get("num_class_embeds")
        return torch.zeros(SAMPLES, dtype=torch.long) if classes else None
    width = {
        "pooled_projections": config.get("pooled_projection_dim"),
        "proj_embedding": config.get("embedding_dim"),
    }.get(name)
    return None if width is None else torch.zeros(SAMPLES, width)
