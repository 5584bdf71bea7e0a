"""Small models as Hugging Face's directories have them, with random weights."""

from pathlib import Path
from typing import Any

import torch


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, **options,
        )
    )  # fmt: skip


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
        )
    )  # fmt: skip


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64))


def bert() -> Any:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=64, max_position_embeddings=64, **sizes))


KINDS = {"llama": llama, "llama-tied": lambda: llama(tie_word_embeddings=True), "mixtral": mixtral, "gpt2": gpt2}


def write(kind: str, directory: Path, max_shard_size: str = "30KB") -> Path:
    """The model `kind` in several files with an index, as its own ``save_pretrained`` writes it."""
    torch.manual_seed(3)
    KINDS[kind]().save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def token_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
