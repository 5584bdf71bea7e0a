"""Eight small models of different kinds. They are large enough that plans differ by more than their overhead."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models.batches import class_loss, main_output, number_loss
from benchmarks.models.case import Batch, Case
from benchmarks.models.plain_language import RecurrentLM
from benchmarks.models.plain_vision import UNet
from benchmarks.models.transformers_ import builder
from tensorshard.models import GPT, Bert, ViT

SAMPLES = 16
"""Samples of a step, on all ranks together."""

_VOCABULARY = 2048
_SIZES = {"vocab_size": _VOCABULARY, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
_T5 = {"vocab_size": _VOCABULARY, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 2, "num_heads": 4}
_RESNET = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2], "layer_type": "basic"}


def _tokens(length: int, name: str | None = None, **others: int) -> Callable[[int, torch.Generator], Batch]:
    """Random tokens, and as many random targets. `others`: further arguments that are tokens, with their lengths."""

    def batch(samples: int, generator: torch.Generator) -> Batch:
        def drawn(size: int) -> torch.Tensor:
            return torch.randint(0, _VOCABULARY, (samples, size), generator=generator)

        tokens: Any = drawn(length)
        if name is not None:
            tokens = {name: tokens, **{other: drawn(size) for other, size in others.items()}}
        return tokens, drawn(next(reversed(others.values()), length))

    return batch


def _images(size: int, classes: int) -> Callable[[int, torch.Generator], Batch]:
    """Random images and their classes; random numbers as targets if `classes` is 0."""

    def batch(samples: int, generator: torch.Generator) -> Batch:
        images = torch.randn(samples, 3, size, size, generator=generator)
        if not classes:
            return images, torch.randn(samples, generator=generator)
        return images, torch.randint(0, classes, (samples,), generator=generator)

    return batch


def _token_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(main_output(output).flatten(0, 1), targets.flatten())


def _bert() -> Bert:
    return Bert(_VOCABULARY, context_length=96, num_layers=3, num_heads=4, width=256, dropout=0.0)


MODELS = {
    case.name: case
    for case in (
        Case("GPT", "planner", partial(GPT, _VOCABULARY, 96, 3, 4, 256), _tokens(96), _token_loss),
        Case(
            "T5",
            "planner",
            builder("T5ForConditionalGeneration", _T5),
            _tokens(64, "input_ids", decoder_input_ids=64),
            _token_loss,
        ),
        Case("BERT", "planner", _bert, _tokens(96), _token_loss),
        Case(
            "ResNet",
            "planner",
            builder("ResNetForImageClassification", {**_RESNET, "num_labels": 100}),
            _images(64, 100),
            class_loss,
        ),
        Case("ViT", "planner", partial(ViT, 64, 8, 100, 4, 4, 256), _images(64, 100), class_loss),
        Case("U-Net", "planner", partial(UNet, 24), _images(48, 0), number_loss),
        Case(
            "LSTM",
            "planner",
            partial(RecurrentLM, nn.LSTM, width=384, vocabulary=_VOCABULARY),
            _tokens(48),
            _token_loss,
        ),
        Case(
            "mixture of experts",
            "planner",
            builder(
                "MixtralForCausalLM",
                {**_SIZES, "intermediate_size": 512, "num_key_value_heads": 2, "num_local_experts": 4},
            ),
            _tokens(64, "input_ids"),
            _token_loss,
        ),
    )
}
"""By name."""


def build(case: Case) -> nn.Module:
    """The model, in training, with the same weights every time."""
    torch.manual_seed(1)
    return case.build().train()


def batch(case: Case, samples: int) -> Batch:
    """Random inputs and targets, the same every time."""
    return case.batch(samples, torch.Generator().manual_seed(1000))
