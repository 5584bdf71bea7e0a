"""The work that contenders of the offload benchmark share: GPTs of GPT-2's sizes in bf16, one sequence a step."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tensorshard.models import GPT

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=True)

_SEED = 0


@dataclass(frozen=True)
class OffloadWork:
    """A GPT and its batches.

    Args:
        name: of the model's size.
        memory_bytes: what all ranks together may take, page cache included.
        raw_bytes: that are read and written to find out how fast the disk is.
    """

    name: str
    layers: int
    width: int
    heads: int
    memory_bytes: int
    vocabulary: int = 50257
    tokens: int = 256
    raw_bytes: int = 1 << 29

    def build(self) -> GPT:
        return GPT(self.vocabulary, self.tokens, self.layers, self.heads, self.width, tie_embeddings=True)

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, [1, tokens] each, that depend on `step` and `rank` alone."""
        generator = torch.Generator().manual_seed(_SEED + 1_000_003 * step + rank)
        tokens = (torch.rand(1, self.tokens + 1, generator=generator).pow(4) * self.vocabulary).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


WORKS = {
    work.name: work
    for work in (
        OffloadWork("GPT-2 small", layers=12, width=768, heads=12, memory_bytes=1_500_000_000),
        OffloadWork("GPT-2 medium", layers=24, width=1024, heads=16, memory_bytes=2_500_000_000),
        OffloadWork("GPT-2 large", layers=36, width=1280, heads=20, memory_bytes=4_500_000_000),
        OffloadWork("GPT-2 XL", layers=48, width=1600, heads=25, memory_bytes=8_000_000_000),
    )
}
"""The largest has 1.5 billion parameters and 25 GB of weights, gradients and states."""

SMOKE = OffloadWork(
    "a small GPT", layers=2, width=64, heads=2, memory_bytes=1_000_000_000, vocabulary=512, tokens=32, raw_bytes=1 << 24
)
