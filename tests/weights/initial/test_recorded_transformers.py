"""Recorded Hugging Face models start like constructed ones."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tensorshard.weights.initial import Recording, record

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **SMALL, num_key_value_heads=2))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **SMALL))


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10)
    return transformers.ResNetForImageClassification(config)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**TEXT, n_embd=64, n_layer=2, n_head=4))


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=300, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=10)
    return transformers.ViTForImageClassification(config)


def gpt_neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**TEXT, **SMALL))


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def ties(named: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    return {frozenset(name for name in named if named[name] is tensor) for tensor in named.values()}


MODELS = pytest.mark.parametrize("build", [llama, bert, resnet, gpt2, t5, vit, gpt_neox])


@MODELS
def test_replay_equals_construction(build: Callable[[], nn.Module]) -> None:
    source = record(build, seed=0)
    assert isinstance(source, Recording)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = tensors(build())
    fake_copies = tensors(source.module)
    assert source.names() == list(fake_copies) == list(built)
    assert ties(fake_copies) == ties(built)
    for name, expected in built.items():
        assert torch.equal(source.tensor(name), expected), name
        assert source.tensor(name).dtype == expected.dtype
        fake_copy = fake_copies[name]
        assert fake_copy.is_meta and fake_copy.requires_grad == expected.requires_grad
        assert (fake_copy.shape, fake_copy.dtype, fake_copy.stride()) == (
            expected.shape,
            expected.dtype,
            expected.stride(),
        )
