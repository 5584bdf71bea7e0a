"""Speech, several modalities, and time series in transformers."""

from typing import Any

from benchmarks.models.batches import (
    VOCABULARY,
    Batches,
    all_numbers_loss,
    class_loss,
    number_loss,
    numbers,
    several,
    token_loss,
)
from benchmarks.models.case import Case, Loss
from benchmarks.models.transformers_ import CLASSIFIES, GROUPED, NO_TOKENS, SIZES, TEXT, builder

_SPEECH = {
    **SIZES, **CLASSIFIES, "vocab_size": VOCABULARY, "conv_dim": [16, 16], "conv_kernel": [10, 3],
    "conv_stride": [5, 2], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2, "classifier_proj_size": 16, "pad_token_id": 0,
}  # fmt: skip
_VISION = {**SIZES, "image_size": 32, "patch_size": 8}
_CLIP_TEXT = {
    **SIZES, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
_ids = {"input_ids": ((12,), VOCABULARY)}
_image = {"pixel_values": (3, 32, 32)}


def _case(
    name: str, model: str, settings: dict[str, Any], batch: Batches, loss: Loss, group: str, random: str = "same"
) -> Case:
    return Case(name, "transformers", builder(model, settings), batch, loss, group, is_sequence=True, random=random)


def embeddings_loss(output: Any, targets: Any) -> Any:
    """A loss of each sample's own pair of embeddings, for models whose usual loss couples the samples of a batch."""
    products = (output.text_embeds * output.image_embeds).sum(-1)
    return number_loss(products, targets)


def _llava(samples: int, generator: Any) -> Any:
    import torch

    inputs, _ = several(_image, indices={"input_ids": ((20,), VOCABULARY - 4)})(samples, generator)
    inputs["input_ids"][:, 1:17] = VOCABULARY - 1  # where the 16 patches go
    return inputs, torch.randint(0, VOCABULARY, (samples, 20), generator=generator)


CASES = [
    _case("wav2vec 2", "Wav2Vec2ForSequenceClassification", _SPEECH,
          numbers(400, name="input_values", targets="classes"), class_loss, "speech"),
    _case("HuBERT", "HubertForSequenceClassification", _SPEECH,
          numbers(400, name="input_values", targets="classes"), class_loss, "speech"),
    _case("Whisper", "WhisperForConditionalGeneration", {
        "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 16,
        "max_source_positions": 20, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
    }, several({"input_features": (16, 40)}, indices={"decoder_input_ids": ((8,), 64)}), number_loss, "speech"),
    _case("AST", "ASTForAudioClassification", {
        **SIZES, **CLASSIFIES, "patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": 32,
        "num_mel_bins": 16,
    }, numbers(32, 16, name="input_values", targets="classes"), class_loss, "speech"),
    _case("CLIP", "CLIPModel", {"text_config": _CLIP_TEXT, "vision_config": _VISION, "projection_dim": 16},
          several(_image, indices=_ids), embeddings_loss, "several modalities"),
    _case("SigLIP", "SiglipModel", {"text_config": {**_CLIP_TEXT, "projection_size": 32}, "vision_config": _VISION},
          several(_image, indices={"input_ids": ((16,), VOCABULARY)}), embeddings_loss, "several modalities"),
    _case("ViLT", "ViltForQuestionAnswering", {
        **TEXT, "image_size": 32, "patch_size": 8, **CLASSIFIES, "max_image_length": -1,
    }, several(_image, indices=_ids, targets="classes"), class_loss, "several modalities", "by_rank"),  # draws patches
    _case("LLaVA", "LlavaForConditionalGeneration", {
        "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        "text_config": {**TEXT, **GROUPED, **NO_TOKENS, "model_type": "llama"},
        "image_token_index": VOCABULARY - 1, "image_token_id": VOCABULARY - 1, "image_seq_length": 16,
    }, _llava, token_loss, "several modalities"),
    _case("SAM vision encoder", "SamVisionModel", {
        **SIZES, "image_size": 32, "patch_size": 8, "output_channels": 16, "window_size": 2, "global_attn_indexes": [1],
        "mlp_dim": 64, "num_pos_feats": 8,
    }, numbers(3, 32, 32, name="pixel_values"), number_loss, "several modalities"),
    _case("PatchTST", "PatchTSTForPrediction", {
        "d_model": 32, "num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8,
        "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "prediction_length": 4, "scaling": None,
        "loss": "mse",
    }, numbers(32, 3, name="past_values"), all_numbers_loss, "time series"),
    _case("PatchTSMixer", "PatchTSMixerForPrediction", {
        "d_model": 16, "num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8,
        "num_layers": 2, "prediction_length": 4, "loss": "mse",
    }, numbers(32, 3, name="past_values"), number_loss, "time series"),
    _case("Decision Transformer", "DecisionTransformerModel", {
        "state_dim": 4, "act_dim": 2, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 32,
        "n_positions": 64, **NO_TOKENS,
    }, several({"states": (6, 4), "actions": (6, 2), "rewards": (6, 1), "returns_to_go": (6, 1)},
               indices={"timesteps": ((6,), 32), "attention_mask": ((6,), 2)}), all_numbers_loss, "time series"),
]  # fmt: skip
