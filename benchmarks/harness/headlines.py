"""What this project's sources are known for, as plans of ours on the same hardware."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import tensorshard as ts
from tensorshard.estimate.hardware import find_hardware
from tensorshard.models import GPT, Bert, next_token_loss

ADAMW = partial(torch.optim.AdamW, lr=1e-4)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
_MIXED = {"precision": "bf16", "zero": 3}


@dataclass(frozen=True)
class Headline:
    """A claim, and what of ours does the same.

    Args:
        name: the claim. source: who is known for it.
        ranks, device: the hardware. memory: in place of the device's, for one without a name.
        fields: of the Plan.
        size, unit: what grows with the model, such as 808 layers, and what it is called.
        build: the model of a size.
        batch: one data rank's inputs and targets.
    """

    name: str
    source: str
    ranks: int
    device: str
    fields: dict[str, Any]
    size: int
    unit: str
    build: Callable[[int], Callable[[], nn.Module]]
    batch: Callable[[], tuple[Any, Any]]
    optimizer: Any = ADAMW
    loss: Callable[[Any, Any], Any] = next_token_loss
    notes: str = ""


@dataclass(frozen=True)
class Finding:
    """What came of a headline; bytes on the device.

    Args:
        needed: at the headline's size.
        largest: the largest size that fits.
        needed_largest: then.
    """

    name: str
    source: str
    hardware: str
    plan: str
    size: int
    unit: str
    needed: int
    memory: int
    largest: int
    needed_largest: int
    by_category: dict[str, int] = field(default_factory=dict)
    notes: str = ""

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory


def find(headline: Headline) -> Finding:
    """Estimates the headline, and the largest model of its shape that fits.

    Memory grows almost linearly with the size: two sizes give a line, and the size at which it meets the memory is
    estimated, too, and made smaller until it fits.
    """
    hardware = find_hardware(headline.device)
    assert hardware is not None
    asked = _needed(headline, headline.size)
    half = max(1, headline.size // 2)
    slope = (asked[0] - _needed(headline, half)[0]) / (headline.size - half)
    largest = max(1, int(headline.size + (hardware.memory - asked[0]) / slope))
    needed = _needed(headline, largest)[0]
    while needed > hardware.memory and largest > 1:
        largest = max(1, largest - max(1, int((needed - hardware.memory) / slope) + 1))
        needed = _needed(headline, largest)[0]
    words = " ".join(
        f"{name}={value}" for name, value in headline.fields.items() if name not in ("tp_plan", "tp_check")
    )
    return Finding(
        headline.name, headline.source, f"{headline.ranks} x {headline.device}", words, headline.size, headline.unit,
        asked[0], hardware.memory, largest, needed, asked[1], headline.notes,
    )  # fmt: skip


def _needed(headline: Headline, size: int) -> tuple[int, dict[str, int]]:
    inputs, targets = headline.batch()
    found = ts.estimate(
        headline.build(size),
        ts.Plan(**headline.fields),
        world_size=headline.ranks,
        inputs=inputs,
        targets=targets,
        optimizer=headline.optimizer,
        loss_fn=headline.loss,
        hardware=headline.device,
    )
    return found.largest.peak_device, found.largest.by_category


def _tokens(samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(samples, length, dtype=torch.long)
    return tokens, tokens


def _gpt(width: int, heads: int, context: int, vocab_size: int = 50304) -> Callable[[int], Callable[[], nn.Module]]:
    return lambda layers: partial(
        GPT, vocab_size=vocab_size, context_length=context, num_layers=layers, num_heads=heads, width=width
    )


class Classifier(nn.Module):
    """ResNet-50 up to its features, and a head of any number of classes that is its loss."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel

        self.backbone = ResNetModel(ResNetConfig())  # of ResNet-50
        self.head = ts.nn.ParallelLinearCrossEntropy(2048, classes)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images).pooler_output.flatten(1), targets)


def _images() -> tuple[Any, torch.Tensor]:
    targets = torch.zeros(32, dtype=torch.long)
    return (torch.zeros(32, 3, 224, 224), targets), targets


def _given(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return output


def _resnet(ranks: int, classes: int) -> Headline:
    return Headline(
        f"ResNet-50 with {classes // 1_000_000}M classes",
        "TorchShard",
        ranks,
        "titan-xp",
        {"zero": 0, "tp": ranks, "tp_plan": {"head": "classes"}, "tp_check": False},
        classes,
        "classes",
        lambda count: partial(Classifier, count),
        _images,
        SGD,
        _given,
        "32 images a micro-batch; the classes alone are split",
    )


BERT_REPORTED = {1: 8667, 2: 5615, 4: 4841, 8: 4127, 16: 3700}
"""Paddle Fleet's MB of BERT-Large on so many V100s with sharding, recomputation and AMP."""


def bert_large(layers: int = 24) -> Callable[[], nn.Module]:
    return partial(Bert, vocab_size=30522, context_length=512, num_layers=layers, num_heads=16, width=1024, dropout=0.0)


def bert_bytes(ranks: int, samples: int) -> int:
    """Live bytes of BERT-Large under ZeRO 3, full recomputation and bf16."""
    tokens, targets = _tokens(samples, 512)
    found = ts.estimate(
        bert_large(),
        ts.Plan(**_MIXED, recompute="full"),
        world_size=ranks,
        inputs=tokens,
        targets=targets,
        optimizer=ADAMW,
        loss_fn=next_token_loss,
    )
    return found.largest.peak_allocated


HEADLINES = (
    _resnet(8, 1_000_000),
    _resnet(16, 2_000_000),
    Headline(
        "minGPT of 808M parameters",
        "TorchShard",
        8,
        "titan-xp",
        {**_MIXED, "recompute": "none"},
        64,
        "layers of width 1024",
        _gpt(1024, 16, 128, vocab_size=256),
        lambda: _tokens(32, 128),
    ),
    Headline(
        "GPT-2 of 1.5B parameters",
        "Colossal-AI and Fairscale",
        4,
        "rtx-3090",
        {**_MIXED, "recompute": "full"},
        48,
        "layers of width 1600",
        _gpt(1600, 25, 1024),
        lambda: _tokens(4, 1024),
    ),
    Headline(
        "115B parameters",
        "PatrickStar and ZeRO",
        128,
        "v100-32",
        {**_MIXED, "recompute": "full"},
        70,
        "layers of width 11712",
        _gpt(11712, 96, 1024),
        lambda: _tokens(1, 1024),
    ),
)
NOT_POSSIBLE = ("175B with parameters on disk: estimates do not know offload.parameters in this version",)
