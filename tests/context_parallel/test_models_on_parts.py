"""Models of transformers, unchanged."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from sequence_parity import LAYOUTS, check_model

VOCABULARY, BATCH, LENGTH = 97, 2, 37
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128,
)  # fmt: skip
T5 = dict(vocab_size=VOCABULARY, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, dropout_rate=0)
NO_DROPOUT = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def padding() -> torch.Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -9:] = 0
    return mask


def next_token_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """In the model's type; transformers' own loss is always taken in fp32."""
    rest = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**rest, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def token_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    rest = {key: value for key, value in batch.items() if key != "labels"}
    return F.cross_entropy(model(**rest).logits.flatten(0, -2), batch["labels"].flatten())


def language_model(kind: Any, config: Any, **extra: Any) -> Any:
    x = tokens()
    labels = x.clone()
    labels[0, :5] = -100
    dims = {"input_ids": 1, "labels": 1} | dict.fromkeys(extra, 1)
    return kind(config), {"input_ids": x, "labels": labels, **extra}, dims, next_token_loss


MODELS: dict[str, Any] = {
    "Llama": lambda: language_model(tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "GPT-2": lambda: language_model(
        tf.GPT2LMHeadModel,
        tf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0,
        ),
    ),
    "Llama, padded": lambda: language_model(
        tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, num_key_value_heads=1), attention_mask=padding()
    ),
    "Llama, padded left": lambda: language_model(
        tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, num_key_value_heads=2), attention_mask=padding().flip(1)
    ),
    "Llama, no tokens on a rank": lambda: language_model(
        tf.LlamaForCausalLM,
        tf.LlamaConfig(**SIZES, num_key_value_heads=2),
        attention_mask=(torch.arange(LENGTH) >= 20).long().repeat(BATCH, 1),
    ),
    "Llama, packed, eager": lambda: language_model(
        tf.LlamaForCausalLM,
        tf.LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="eager"),
        position_ids=torch.cat([torch.arange(10), torch.arange(15), torch.arange(LENGTH - 25)]).repeat(BATCH, 1),
    ),
    "Llama, eager": lambda: language_model(
        tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="eager")
    ),
    "Llama, packed": lambda: language_model(
        tf.LlamaForCausalLM,
        tf.LlamaConfig(**SIZES, num_key_value_heads=2),
        position_ids=torch.cat([torch.arange(10), torch.arange(15), torch.arange(LENGTH - 25)]).repeat(BATCH, 1),
    ),
    "Mistral, a window": lambda: language_model(
        tf.MistralForCausalLM, tf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8)
    ),
    "Mixtral": lambda: language_model(
        tf.MixtralForCausalLM,
        tf.MixtralConfig(
            **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
        ),
    ),
    "Mamba": lambda: language_model(
        tf.MambaForCausalLM, tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "BERT, padded": lambda: (
        tf.BertForMaskedLM(tf.BertConfig(**SIZES, **NO_DROPOUT)),
        {"input_ids": tokens(), "attention_mask": padding(), "labels": tokens()},
        {"input_ids": 1, "attention_mask": 1},
        token_loss,
    ),
    "BERT, classes": lambda: (
        tf.BertForSequenceClassification(tf.BertConfig(**SIZES, **NO_DROPOUT, num_labels=3)),
        {"input_ids": tokens(), "attention_mask": padding(), "labels": torch.tensor([0, 2])},
        {"input_ids": 1, "attention_mask": 1},
        token_loss,
    ),
    "T5": lambda: (
        tf.T5ForConditionalGeneration(tf.T5Config(**T5)),
        {"input_ids": tokens(), "attention_mask": padding(), "decoder_input_ids": tokens(21), "labels": tokens(21)},
        {"input_ids": 1, "attention_mask": 1, "decoder_input_ids": 1},
        next_token_loss,
    ),
    "ViT": lambda: (
        tf.ViTForImageClassification(
            tf.ViTConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32,
                patch_size=4, num_labels=3, **NO_DROPOUT,
            )
        ),
        {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.tensor([0, 2])},
        {"pixel_values": 2},
        token_loss,
    ),
    "Whisper": lambda: (
        tf.WhisperForConditionalGeneration(
            tf.WhisperConfig(
                vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, dropout=0,
                max_source_positions=37, max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=1,
            )
        ),
        {"input_features": torch.randn(BATCH, 8, 74), "decoder_input_ids": tokens(21), "labels": tokens(21)},
        {"input_features": 2, "decoder_input_ids": 1},
        next_token_loss,
    ),
}  # fmt: skip

FAST = ("Llama", "GPT-2")
BOUNDS = {"Mamba": 1e-6, "T5": 1e-6}
"""Models that compute parts of themselves in fp32."""


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_a_model_is_exact(name, layout, size):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch, dims, loss_of = MODELS[name]()
        group = check_model(
            model.train(), batch, dims, loss_of=loss_of, size=size, layout=LAYOUTS[layout], bound=BOUNDS.get(name, 1e-9)
        )
    if name in FAST and layout != "scattered":
        assert not group.fallbacks
