"""What Hugging Face's models of several kinds are run on where nobody gave inputs."""

from typing import Any

import pytest
import torch

from tensorshard.model.sample_inputs import example_inputs
from tensorshard.model.transformers_inputs import transformers_inputs

_SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_IMAGE = {**_SIZES, "image_size": 16, "patch_size": 8}
_TEXT = {**_SIZES, "vocab_size": 32, "max_position_embeddings": 32}
_SPEECH = {**_SIZES, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "image": ("ViTModel", _IMAGE, {"pixel_values": (2, 3, 16, 16)}),
    "text and image": (
        "CLIPModel",
        {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 8},
        {"input_ids": (2, 6), "pixel_values": (2, 3, 16, 16)},
    ),
    "waveform": ("Wav2Vec2Model", _SPEECH, {"input_values": (2, 4000)}),
    "spectrogram": (
        "ASTModel",
        {**_SIZES, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
        {"input_values": (2, 32, 16)},
    ),
    "speech to text": (
        "WhisperModel",
        {
            "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 10, "pad_token_id": 0,
        },
        {"input_features": (2, 8, 20), "decoder_input_ids": (2, 5)},
    ),
    "series": (
        "PatchTSTModel",
        {"d_model": 16, "num_input_channels": 3, "context_length": 32, "num_hidden_layers": 1, "patch_length": 8},
        {"past_values": (2, 32, 3)},
    ),
    "decisions": (
        "DecisionTransformerModel",
        {"state_dim": 4, "act_dim": 2, "hidden_size": 16, "n_layer": 1, "n_head": 2},
        {"states": (2, 6, 4), "actions": (2, 6, 2), "timesteps": (2, 6)},
    ),
}  # fmt: skip


def _runs(model: Any, inputs: dict[str, Any]) -> bool:
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception:  # whatever a model makes of inputs that are not its own
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_the_first_guesses_runs(kind):
    import transformers

    name, settings, shapes = KINDS[kind]
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**settings)).eval()
    chosen = next(inputs for inputs in example_inputs(model)[:2] if _runs(model, inputs))
    assert {key: tuple(chosen[key].shape) for key in shapes} == shapes


def test_several_tokens_may_end_a_text():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**_SIZES, "vocab_size": 16, "eos_token_id": [5, 10], "pad_token_id": None}
    (tokens,) = [inputs["input_ids"] for inputs in transformers_inputs(LlamaForCausalLM(LlamaConfig(**sizes)))]
    assert not {1, 5, 10} & set(tokens.flatten().tolist())


def test_other_models_say_nothing():
    assert transformers_inputs(torch.nn.Linear(2, 2)) == []
