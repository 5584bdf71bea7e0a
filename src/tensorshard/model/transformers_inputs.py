"""Inputs for Hugging Face's models, made from their configs: tokens, images, speech, series, or several of them."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

SAMPLES = 2
TOKENS = 6
_LARGEST_TOKEN = 100
_WAVEFORM = 4000
_PARTS = ("text_config", "vision_config", "audio_config")

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
    found = []
    for value in _values(config, main):
        found.append({main: value, **beside})
        if main == "input_ids" and "pixel_values" in accepted and _look_up(config, "image_size") is not None:
            found.append({main: value, "pixel_values": _image(config), **beside})
    if main == "states":  # a decision transformer, with earlier actions and rewards
        found.insert(0, _decisions(config))
    return found


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
