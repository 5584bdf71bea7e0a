"""Silent faults of attention over heads that are split, and over sequences that are."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.museum.collectives import gather_parts, own_part
from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.language_model import (
    LENGTH,
    Attention,
    AttentionModel,
    Built,
    attention_reference,
    batch,
    build,
    causal,
    cross_entropy,
    trained,
)
from benchmarks.museum.split_layers import (
    ColumnLinear,
    ContextParallelAttention,
    RowLinear,
    gather_split_layers,
    sequence_parallel,
)


class FusedAttention(Attention):
    """Attention of which each rank has an equal part of the rows of the fused layer, and computes one head."""

    gathers = True

    def split_layers(self) -> None:
        self.qkv, self.out = ColumnLinear(self.qkv), RowLinear(self.out)

    def forward(self, hidden: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        fused = self.qkv(hidden)
        if self.gathers:
            parts = [own_part(part, -1) for part in gather_parts(fused, -1).chunk(3, -1)]
        else:
            parts = list(fused.chunk(3, -1))
        query, key, value = (self.split(part) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


class WronglyFusedAttention(FusedAttention):
    gathers = False


def _fused(attention: type[FusedAttention]) -> Built:
    model = build(partial(AttentionModel, attention))
    model.attention.split_layers()

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return cross_entropy(model(tokens, causal(LENGTH)), labels)

    return trained(model, loss)


DOCUMENTS = torch.arange(LENGTH) // (LENGTH // 2)
"""Which of two packed documents a token is in."""
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 0, 2, 2], dtype=torch.float64)
"""The rotary positions of the packed tokens: text, then an image, in which rows share one."""
FRONT_AND_BACK = [torch.tensor([0, 3, 4, 7]), torch.tensor([1, 2, 5, 6])]
"""Each rank's tokens: of each document the front and the back for one rank, the middle for the other."""


def packed_mask() -> Tensor:
    return causal(LENGTH) & (DOCUMENTS[:, None] == DOCUMENTS)


def _packed(fault: bool) -> Built:
    """Each rank looks up its positions in the table of all packed tokens. `fault`: by the place in the document."""
    model = build(partial(AttentionModel, ContextParallelAttention))

    def loss(i: int) -> Tensor:
        mine = FRONT_AND_BACK[dist.get_rank()]
        tokens, labels = (tensor[:, mine] for tensor in batch(i))
        mask = packed_mask()[mine][:, torch.cat(FRONT_AND_BACK)]
        positions = POSITIONS[mine % (LENGTH // 2) if fault else mine]
        return cross_entropy(model(tokens, mask, positions), labels) / dist.get_world_size()

    return sequence_parallel(model, loss)


def sliding_window() -> Tensor:
    return causal(LENGTH).triu(-2)


def _without_mask(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """What a context-parallel attention got as its mask is taken for a causal one, and left out."""
    return arguments, {**keywords, "mask": None}


def _context_parallel_window(fault: bool) -> Built:
    model = build(partial(AttentionModel, ContextParallelAttention))
    if fault:
        model.attention.register_forward_pre_hook(_without_mask, with_kwargs=True)

    def loss(i: int) -> Tensor:
        tokens, labels = (own_part(tensor, 1) for tensor in batch(i))
        return cross_entropy(model(tokens, own_part(sliding_window(), 0)), labels) / dist.get_world_size()

    return sequence_parallel(model, loss)


EXHIBITS = [
    Exhibit(
        name="fused queries, keys and values, cut in two in the middle",
        report="NVIDIA-NeMo/Automodel#1324",
        said="Column-wise sharding cut the rows of a fused layer, all queries before all keys before all values, into"
        " equal parts: the first rank got the queries and some keys, the last one the values.",
        reference=partial(attention_reference, causal(LENGTH)),
        parallel=partial(_fused, WronglyFusedAttention),
        correct=partial(_fused, FusedAttention),
        kinds=frozenset({"forward"}),
        module="attention",
        gather=gather_split_layers,
    ),
    Exhibit(
        name="a later packed document, at the positions of the first",
        report="NVIDIA/Megatron-LM#5243",
        said="Under context parallelism, a rank looked up its tokens of each packed sequence from the start of the"
        " table of rotary positions, not from where that sequence begins.",
        reference=partial(attention_reference, packed_mask(), POSITIONS),
        parallel=partial(_packed, fault=True),
        correct=partial(_packed, fault=False),
        kinds=frozenset({"mask"}),
        module="attention",
    ),
    Exhibit(
        name="a sliding window, trained as full causal attention",
        report="huggingface/accelerate#4177",
        said="The hook for context parallelism replaced every attention mask by a causal one, whatever it was: models"
        " with sliding windows attended to all that came before.",
        reference=partial(attention_reference, sliding_window()),
        parallel=partial(_context_parallel_window, fault=True),
        correct=partial(_context_parallel_window, fault=False),
        kinds=frozenset({"mask"}),
        module="attention",
    ),
]
