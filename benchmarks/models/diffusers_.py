"""Cases of diffusers: its denoisers and autoencoders, with small sizes."""

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.models.batches import Batches, images, number_loss, several
from benchmarks.models.case import Case


def _built(name: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        made: nn.Module = getattr(diffusers, name)(**settings)
        return made

    return build


def _case(name: str, model: str, batch: Batches, *, is_sequence: bool = False, **settings: Any) -> Case:
    group = "transformers" if is_sequence else "convolutions"
    return Case(name, "diffusers", _built(model, settings), batch, number_loss, group, is_sequence=is_sequence)


def _sequence(name: str, model: str, batch: Batches, **settings: Any) -> Case:
    return _case(name, model, batch, is_sequence=True, **settings)


_TIME = {"timestep": ((), 1000)}
_TEXT = {"encoder_hidden_states": (6, 32)}
_IMAGE = {"sample": (4, 16, 16)}
_LATENT = {"hidden_states": (4, 8, 8)}
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
_UNET = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
_AUTOENCODER = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4, "sample_size": 32,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
}  # fmt: skip

CASES = [
    _case("UNet2D", "UNet2DModel", several({"sample": (3, 16, 16)}, indices=_TIME), **_UNET, attention_head_dim=8,
          down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    _case("UNet2D, conditional", "UNet2DConditionModel", several({**_IMAGE, **_TEXT}, indices=_TIME), **_UNET,
          cross_attention_dim=32, attention_head_dim=4,
          down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
    _case("UNet1D", "UNet1DModel", several({"sample": (14, 32)}, indices=_TIME), in_channels=14, out_channels=14,
          block_out_channels=(16, 32), down_block_types=("DownResnetBlock1D",) * 2, norm_num_groups=4,
          up_block_types=("UpResnetBlock1D",) * 1, time_embedding_type="positional", use_timestep_embedding=True,
          out_block_type="OutConv1DBlock", mid_block_type="MidResTemporalBlock1D", act_fn="swish",
          flip_sin_to_cos=False, freq_shift=1),
    _case("UNet3D, conditional", "UNet3DConditionModel", several({"sample": (4, 2, 8, 8), **_TEXT}, indices=_TIME),
          sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, cross_attention_dim=32,
          attention_head_dim=4, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
          up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
    _case("AutoencoderKL", "AutoencoderKL", images("sample", targets="number"), **_AUTOENCODER),
    _case("VQModel", "VQModel", images("sample", targets="number"), **_AUTOENCODER, num_vq_embeddings=16),
    _case("AutoencoderTiny", "AutoencoderTiny", images("sample", targets="number"), encoder_block_out_channels=(8, 8),
          decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
    _sequence("DiT", "DiTTransformer2DModel",
              several(_LATENT, indices={**_TIME, "class_labels": ((), 10)}), **_HEADS, in_channels=4, out_channels=4,
              sample_size=8, patch_size=2, norm_num_groups=4, num_embeds_ada_norm=10),
    _sequence("PixArt", "PixArtTransformer2DModel", several({**_LATENT, **_TEXT}, indices=_TIME), **_HEADS,
              in_channels=4, out_channels=4, sample_size=8, patch_size=2, cross_attention_dim=32, caption_channels=32,
              norm_num_groups=4, use_additional_conditions=False),
    _sequence("Stable Diffusion 3", "SD3Transformer2DModel",
              several({**_LATENT, **_TEXT, "pooled_projections": (24,)}, indices=_TIME), **_HEADS, sample_size=8,
              patch_size=2, in_channels=4, out_channels=4, joint_attention_dim=32, caption_projection_dim=32,
              pooled_projection_dim=24, pos_embed_max_size=8),
    _sequence("AuraFlow", "AuraFlowTransformer2DModel", several({**_LATENT, **_TEXT}, indices=_TIME), sample_size=8,
              patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
              attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32,
              pos_embed_max_size=16),
    _sequence("Sana", "SanaTransformer2DModel", several({**_LATENT, **_TEXT}, indices=_TIME), **_HEADS, in_channels=4,
              out_channels=4, num_cross_attention_heads=4, cross_attention_head_dim=8, cross_attention_dim=32,
              caption_channels=32, sample_size=8, patch_size=1),
    _sequence("Prior", "PriorTransformer",
              several({"hidden_states": (32,), "proj_embedding": (32,), **_TEXT}, indices=_TIME),
              **_HEADS, embedding_dim=32, num_embeddings=6, additional_embeddings=4),
    _sequence("CogVideoX", "CogVideoXTransformer3DModel",
              several({"hidden_states": (2, 4, 8, 8), **_TEXT}, indices=_TIME), **_HEADS, in_channels=4,
              out_channels=4, text_embed_dim=32, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
              max_text_seq_length=6, time_embed_dim=16),
]  # fmt: skip
