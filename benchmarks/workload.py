"""The work that contenders share: a GPT, its data, loss and optimizer. None of it knows of parallelism."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tensorshard.models import GPT

OPTIMIZER = partial(torch.optim.AdamW, lr=3e-4, fused=True)
"""Every contender's optimizer."""

_SEED = 0


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over this rank's tokens, in nats."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def loss_of_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """The same by way of the probabilities of all classes, as some losses need them."""
    return -logits.softmax(-1).gather(-1, targets[..., None]).log().mean()


LOSSES = {"cross entropy": loss_fn, "softmax": loss_of_probabilities}
"""By what contenders' options call them."""


@dataclass(frozen=True)
class Workload:
    """A GPT in fp32 and its batches.

    Args:
        name: of the model's size.
        num_layers: blocks.
        num_heads: attention heads of a block.
        width: features of a token.
        vocab_size: number of different tokens.
        context_length: tokens of a sequence.
        batch_size: sequences on each rank in each step.
        family: "gpt", that of tensorshard; or one of transformers, as in :mod:`benchmarks.language_models`.
    """

    name: str
    num_layers: int
    num_heads: int
    width: int
    vocab_size: int
    context_length: int
    batch_size: int
    family: str = "gpt"

    def model(self) -> Any:
        """The model with its initial weights, which are the same on every rank and for every contender."""
        torch.manual_seed(_SEED)
        return self.constructed()

    def constructed(self) -> Any:
        """The model, whose constructor draws from torch's random numbers as they are, so that it can be recorded."""
        if self.family != "gpt":
            from benchmarks.language_models import FAMILIES

            sizes = self.num_layers, self.num_heads, self.width, self.vocab_size, self.context_length
            return FAMILIES[self.family](*sizes)
        return GPT(
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            width=self.width,
        )

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, ``[batch_size, context_length]`` each, that depend on `step` and `rank` alone.

        Small tokens are far more frequent than large ones. So there is something to learn, and a contender
        that forgets to update or to average shows in the loss.
        """
        generator = torch.Generator().manual_seed(_SEED + 1_000_003 * step + rank)
        uniform = torch.rand(self.batch_size, self.context_length + 1, generator=generator)
        tokens = (uniform.pow(4) * self.vocab_size).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


GPT2_SMALL = Workload("GPT-2 small", 12, 12, 768, 50_257, context_length=512, batch_size=4, family="gpt2")
"""124 million parameters, as transformers has it."""
