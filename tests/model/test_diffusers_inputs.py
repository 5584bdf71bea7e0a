"""What models in diffusers' manner are guessed to take: a config that is a mapping, and a forward with its names."""

from typing import Any

import pytest
import torch
from torch import nn

from tensorshard.model.diffusers_inputs import diffusers_inputs
from tensorshard.model.sample_inputs import example_inputs


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


_TEXT = {"in_channels": 4, "sample_size": 16, "cross_attention_dim": 32}
_LATENT = {"in_channels": 4, "sample_size": (8, 6), "joint_attention_dim": 24, "pooled_projection_dim": 20}
_VIDEO = {
    "in_channels": 4, "sample_frames": 5, "sample_height": 8, "sample_width": 6, "text_embed_dim": 24,
    "max_text_seq_length": 7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (
            _UNet(nn.Conv2d, _TEXT),
            {"sample": (2, 4, 16, 16), "timestep": (2,), "encoder_hidden_states": (2, 6, 32)},
        ),
        (
            _UNet(nn.Conv1d, {**_TEXT, "sample_size": 65536}),
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
