"""Known claims of other projects, as plans of tensorshard on the same hardware."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import tensorshard as ts
from tensorshard.models import GPT, Bert, next_token_loss
from tensorshard.predict.hardware import find_hardware
from tensorshard.predict.rank_estimate import RankEstimate

ADAMW = partial(torch.optim.AdamW, lr=1e-4)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
_MIXED = {"precision": "bf16", "zero": 3}
_HALF = {"precision": "fp16", "zero": 3}  # for devices without bf16
_UNSAID = ("tp_plan", "tp_check")
_STEPS = 8  # the number of estimates to find the largest model
_LARGEST = 16  # the largest model is at most this many times the headline's


@dataclass(frozen=True)
class Headline:
    """A claim, and tensorshard's counterpart.

    Args:
        name: the claim. source: who made it.
        ranks, device: the hardware.
        fields: of the Plan.
        size, unit: the size that grows with the model, such as 808 layers, and its unit.
        build: makes the model of a size.
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
    """The results for a headline, in bytes on the device.

    Args:
        size, parameters, needed: for the headline's model.
        largest, largest_parameters, needed_largest: for the largest model of its shape that fits; 0 if none does.
        host_bytes, disk_bytes: what a rank of the headline's model has in host memory and on disk.
    """

    name: str
    source: str
    hardware: str
    plan: str
    size: int
    unit: str
    parameters: int
    needed: int
    memory: int
    largest: int
    largest_parameters: int
    needed_largest: int
    host_bytes: int = 0
    disk_bytes: int = 0
    notes: str = ""

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory


def find(headline: Headline) -> Finding:
    """Estimates the headline, and the largest model of its shape that fits.

    Raises:
        ValueError: the plan suits neither the model nor the hardware.
    """
    hardware = find_hardware(headline.device)
    assert hardware is not None
    known: dict[int, RankEstimate] = {}

    def needed(size: int) -> int:
        if size not in known:
            known[size] = _estimated(headline, size)
        return known[size].peak_device

    largest = largest_that_fits(needed, headline.size, hardware.memory)
    asked = known[headline.size]
    return Finding(
        headline.name,
        headline.source,
        f"{headline.ranks} x {headline.device}",
        " ".join(f"{name}={value}" for name, value in headline.fields.items() if name not in _UNSAID),
        headline.size,
        headline.unit,
        parameters_of(headline.build(headline.size)),
        asked.peak_device,
        hardware.memory,
        largest,
        parameters_of(headline.build(largest)) if largest else 0,
        known[largest].peak_device if largest else 0,
        asked.host_bytes,
        asked.disk_bytes,
        headline.notes,
    )


def largest_that_fits(needed: Callable[[int], int], size: int, memory: int) -> int:
    """The largest size that needs no more than `memory`, to within a thousandth of `size`; 0 if there is none.

    Memory grows almost linearly: `size` and its half give a line, which says where to look next. Once a size that fits
    and one that does not are known, the line between these two does. One more than the largest does not fit by an
    estimate, or by the line.

    Args:
        needed: bytes by size.
    """
    half = max(1, size // 2)
    slope = max(1.0, (needed(size) - needed(half)) / max(1, size - half))
    low, high = 0, _LARGEST * size + 1  # what is known to fit, and what is not, or is not asked for
    for other in (half, size):
        low, high = (other, high) if needed(other) <= memory else (low, min(high, other))
    for _ in range(_STEPS):
        known = low or high
        if low and high <= _LARGEST * size:
            slope = max(1.0, (needed(high) - needed(low)) / (high - low))
        left = int((memory - needed(known)) / slope)  # how many more would fit, along the line
        if high - low <= max(1, size // 1000) or (known == low and left == 0):
            break
        guess = min(max(known + left, low + 1), high - 1)
        low, high = (guess, high) if needed(guess) <= memory else (low, guess)
    return low


def parameters_of(build: Callable[[], nn.Module]) -> int:
    """Parameters of the model that `build` makes."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def _estimated(headline: Headline, size: int) -> RankEstimate:
    inputs, targets = headline.batch()
    return ts.estimate(
        headline.build(size),
        ts.Plan(**headline.fields),
        world_size=headline.ranks,
        inputs=inputs,
        targets=targets,
        optimizer=headline.optimizer,
        loss_fn=headline.loss,
        hardware=headline.device,
    ).largest


def _tokens(samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(samples, length, dtype=torch.long)
    return tokens, tokens


def _gpt(width: int, heads: int, context: int, vocab_size: int = 50304) -> Callable[[int], Callable[[], nn.Module]]:
    return lambda layers: partial(
        GPT, vocab_size=vocab_size, context_length=context, num_layers=layers, num_heads=heads, width=width
    )


class Classifier(nn.Module):
    """ResNet-50 without its last layer, and a head of any number of classes that computes the loss."""

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
    estimate = ts.estimate(
        bert_large(),
        ts.Plan(**_MIXED, recompute="full"),
        world_size=ranks,
        inputs=tokens,
        targets=targets,
        optimizer=ADAMW,
        loss_fn=next_token_loss,
    )
    return estimate.largest.peak_allocated


HEADLINES = (
    _resnet(8, 1_000_000),
    _resnet(16, 2_000_000),
    Headline(
        "minGPT of 808M parameters",
        "TorchShard",
        8,
        "titan-xp",
        _HALF,
        64,
        "layers of width 1024",
        _gpt(1024, 16, 128, vocab_size=256),
        lambda: _tokens(32, 128),
        notes="32 samples of 128 tokens a rank",
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
        notes="4 samples of 1,024 tokens a rank",
    ),
    Headline(
        "115B parameters",
        "PatrickStar and ZeRO",
        128,
        "v100-32",
        {**_HALF, "recompute": "full"},
        70,
        "layers of width 11712",
        _gpt(11712, 96, 1024),
        lambda: _tokens(1, 1024),
        notes="1 sample of 1,024 tokens a rank",
    ),
    Headline(
        "175B parameters, on disk",
        "ZeRO-Infinity",
        4,
        "v100-32",
        {**_HALF, "recompute": "full", "offload": "disk"},
        96,
        "layers of width 12288",
        _gpt(12288, 96, 2048),
        lambda: _tokens(1, 2048),
        notes="1 sample of 2,048 tokens a rank; weights, gradients and Adam's states are on disk",
    ),
)
