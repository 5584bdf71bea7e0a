"""Small models of many architectures, and what to feed them, for tests of tensor-parallel tables."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import seeds
from tensorshard.models import GPT, Bert, ViT

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def build(kind: str) -> nn.Module:
    """A model with the same weights every time; none of its biases and norms as their initialisation leaves
    them."""
    seeds.seed(1)
    model = make(kind).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def make(kind: str) -> nn.Module:
    """A model as its constructor makes it."""
    return _BUILDERS[kind]()


def inputs(kind: str) -> Any:
    """What `kind` takes, as for ``Engine.step``."""
    generator = seeds.generator(2)
    if kind in ("vit", "hf_vit"):
        images = torch.randn(3, 3, 16, 16, generator=generator)
        return images if kind == "vit" else {"pixel_values": images}
    tokens = torch.randint(0, 61, (3, 7), generator=generator)
    if kind in ("gpt", "gpt_tied", "bert"):
        return tokens
    if kind == "t5":
        return {"input_ids": tokens, "decoder_input_ids": tokens[:, :5], "use_cache": False}
    return {"input_ids": tokens} if kind == "hf_bert" else {"input_ids": tokens, "use_cache": False}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    undropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **undropped, **_NO_TOKENS))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, use_cache=False))


def _hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, **_UNDROPPED, image_size=16, patch_size=4))


def _bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    return BloomForCausalLM(BloomConfig(**sizes, **_NO_TOKENS, hidden_dropout=0.0, attention_dropout=0.0))


def _mpt() -> nn.Module:
    from transformers import MptConfig, MptForCausalLM

    sizes = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32, "use_cache": False}
    return MptForCausalLM(MptConfig(**sizes, **_NO_TOKENS))


def _gpt_bigcode() -> nn.Module:
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    undropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, **undropped, **_NO_TOKENS))


def _hugging_face(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        family = name.removesuffix("ForCausalLM").removesuffix("ForMaskedLM")
        config = getattr(transformers, f"{family}Config")(**{**_SIZES, **_NO_TOKENS, **settings})
        return getattr(transformers, name)(config)

    return make


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(61, 16, 2, 4, 32),
    "gpt_tied": lambda: GPT(61, 16, 2, 4, 32, tie_embeddings=True),
    "bert": lambda: Bert(61, 16, 2, 4, 32, dropout=0.0),
    "vit": lambda: ViT(16, 4, 5, 2, 4, 32),
    "llama": _hugging_face("LlamaForCausalLM", num_key_value_heads=2),
    "qwen3": _hugging_face("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8),
    "gemma2": _hugging_face(
        "Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, use_cache=False
    ),
    "phi3": _hugging_face("Phi3ForCausalLM", num_key_value_heads=2, pad_token_id=0),
    "gpt_neox": _hugging_face("GPTNeoXForCausalLM"),
    "hf_bert": _hugging_face("BertForMaskedLM", **_UNDROPPED, pad_token_id=0),
    "hf_vit": _hf_vit,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "mpt": _mpt,
    "gpt_bigcode": _gpt_bigcode,
    "mixtral": _hugging_face("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, use_cache=False),
    "llama_one": _hugging_face("LlamaForCausalLM", num_key_value_heads=1, attention_bias=True, use_cache=False),
    "t5": _t5,
}
