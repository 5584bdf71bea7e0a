"""What models of transformers and diffusers are run on where nobody gave inputs."""

from typing import Any

import pytest
import torch
from torch import nn

from tensorshard.model.sample_inputs import diffusers_inputs, example_inputs, transformers_inputs

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


class _UNet(nn.Module):
    def __init__(self, convolution: type[nn.Module], config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.conv_in = convolution(config["in_channels"], 8, 3)

    def forward(self, sample: torch.Tensor, timestep: Any, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
        return sample


class _Transformer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.proj = nn.Conv2d(4, 8, 2).double()

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        pooled_projections: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        class_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return hidden_states


class _Prior(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.proj_in = nn.Linear(config["embedding_dim"], 8)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: Any,
        proj_embedding: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return hidden_states


_CONDITIONED = {"in_channels": 4, "sample_size": 16, "cross_attention_dim": 32}
_LATENT = {"in_channels": 4, "sample_size": (8, 6), "joint_attention_dim": 24, "pooled_projection_dim": 20}
_VIDEO = {
    "in_channels": 4, "sample_frames": 5, "sample_height": 8, "sample_width": 6, "text_embed_dim": 24,
    "max_text_seq_length": 7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (
            _UNet(nn.Conv2d, _CONDITIONED),
            {"sample": (2, 4, 16, 16), "timestep": (2,), "encoder_hidden_states": (2, 6, 32)},
        ),
        (
            _UNet(nn.Conv1d, {**_CONDITIONED, "sample_size": 65536}),
            {"sample": (2, 4, 64), "timestep": (2,), "encoder_hidden_states": (2, 6, 32)},
        ),
        (
            _Transformer(_LATENT),
            {
                "hidden_states": (2, 4, 8, 6),
                "encoder_hidden_states": (2, 6, 24),
                "pooled_projections": (2, 20),
                "timestep": (2,),
            },
        ),
        (
            _Transformer({"in_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 10}),
            {"hidden_states": (2, 4, 8, 8), "timestep": (2,), "class_labels": (2,)},
        ),
        (
            _Transformer(_VIDEO),
            {"hidden_states": (2, 2, 4, 8, 6), "encoder_hidden_states": (2, 7, 24), "timestep": (2,)},
        ),
        (
            _Prior({"embedding_dim": 12, "num_embeddings": 5}),
            {
                "hidden_states": (2, 12),
                "timestep": (2,),
                "proj_embedding": (2, 12),
                "encoder_hidden_states": (2, 5, 12),
            },
        ),
    ],
)
def test_sizes_come_from_the_config(model, shapes):
    guess = example_inputs(model)[0]
    assert {name: tuple(value.shape) for name, value in guess.items()} == shapes
    weight = next(model.parameters())
    assert all(value.dtype == (torch.long if name in ("timestep", "class_labels") else weight.dtype)
               for name, value in guess.items())  # fmt: skip


def test_what_the_config_does_not_tell_is_left_to_other_guesses():
    model = _UNet(nn.Conv2d, {"in_channels": 4})  # nothing says how wide the text is
    assert diffusers_inputs(model) == []
