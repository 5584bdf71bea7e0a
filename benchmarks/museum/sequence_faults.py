"""Silent faults where each rank has a part of every sequence: sequence and context parallelism."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.museum.collectives import gather_parts, own_part, sum_and_scatter, total, whole
from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.language_model import (
    LENGTH,
    Attention,
    AttentionModel,
    Built,
    FeedForwardModel,
    batch,
    build,
    causal,
    cross_entropy,
    rotate,
    trained,
)
from benchmarks.museum.tensor_faults import ColumnLinear, RowLinear, feed_forward_reference, gather_split_layers


class ScatteredRowLinear(RowLinear):
    """A row-parallel layer that leaves each rank its part of the sequence."""

    def forward(self, inputs: Tensor) -> Tensor:
        return sum_and_scatter(F.linear(inputs, self.weight), 1) + self.bias


class _OverlappedRows(torch.autograd.Function):
    """Computes the input's gradient while the output's is gathered: of this rank's positions alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return own_part(total(F.linear(inputs, weight)), 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        of_weight = whole(gradient, 1).flatten(0, 1).T @ inputs.flatten(0, 1)
        return whole(gradient @ weight, 1), of_weight


class OverlappedRowLinear(RowLinear):
    def forward(self, inputs: Tensor) -> Tensor:
        return _OverlappedRows.apply(inputs, self.weight) + self.bias


def _sequence_parallel(down: type[RowLinear] = ScatteredRowLinear, left_out: tuple[str, ...] = ()) -> Built:
    """The block is split over the ranks, all else computes its part of the sequence. `left_out`: not summed."""
    model = build(FeedForwardModel)
    model.up, model.down = ColumnLinear(model.up, partial(gather_parts, dim=1)), down(model.down)

    def loss(i: int) -> Tensor:
        tokens, labels = (own_part(tensor, 1) for tensor in batch(i))
        return cross_entropy(model(tokens), labels) / dist.get_world_size()

    def reduce() -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(("up", "down.weight", *left_out)):
                continue
            dist.all_reduce(parameter.grad)

    model, local_step = trained(model, loss, after_backward=reduce)
    return model, lambda i: total(local_step(i))


class ContextParallelAttention(Attention):
    """Attention of this rank's queries to the keys and values of all ranks. `mask` is that of its queries."""

    def forward(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None = None) -> Tensor:
        query, key, value = (self.split(part) for part in self.qkv(hidden).chunk(3, -1))
        if positions is not None:
            query, key = rotate(query, positions), rotate(key, positions)
        key, value = gather_parts(key, 2), gather_parts(value, 2)
        if mask is None:
            mask = own_part(causal(key.shape[2]), 0)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


def _sum_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def next_tokens(tokens: Tensor) -> Tensor:
    """The label of each token: the token after it, and none, -100, for the last one."""
    return F.pad(tokens[:, 1:], (0, 1), value=-100)


def _labels_reference() -> Built:
    model = build(AttentionModel)

    def loss(i: int) -> Tensor:
        tokens, _ = batch(i)
        return cross_entropy(model(tokens, causal(LENGTH)), next_tokens(tokens))

    return trained(model, loss)


def _labels(shifted_locally: bool) -> Built:
    model = build(partial(AttentionModel, ContextParallelAttention))

    def loss(i: int) -> Tensor:
        tokens, _ = batch(i)
        labels = next_tokens(tokens)
        count = (labels != -100).sum()
        tokens, labels = own_part(tokens, 1), own_part(labels, 1)
        if shifted_locally:
            labels = next_tokens(tokens)
        return cross_entropy(model(tokens, own_part(causal(LENGTH), 0)), labels, "sum") / count

    model, local_step = trained(model, loss, after_backward=lambda: _sum_gradients(model))
    return model, lambda i: total(local_step(i))


DOCUMENTS = torch.arange(LENGTH) // (LENGTH // 2)
"""Which of two packed documents a token is in."""
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 0, 2, 2], dtype=torch.float64)
"""The rotary positions of the packed tokens: text, then an image, in which rows share one."""
FRONT_AND_BACK = [torch.tensor([0, 3, 4, 7]), torch.tensor([1, 2, 5, 6])]
"""Each rank's tokens: of each document the front and the back for one rank, the middle for the other."""


def _packed_mask() -> Tensor:
    return causal(LENGTH) & (DOCUMENTS[:, None] == DOCUMENTS)


def _packed_reference() -> Built:
    model = build(AttentionModel)

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return cross_entropy(model(tokens, _packed_mask(), POSITIONS), labels)

    return trained(model, loss)


def _packed(fault: bool) -> Built:
    """Each rank looks up its positions in the table of all packed tokens. `fault`: by the place in the document."""
    model = build(partial(AttentionModel, ContextParallelAttention))

    def loss(i: int) -> Tensor:
        mine = FRONT_AND_BACK[dist.get_rank()]
        tokens, labels = (tensor[:, mine] for tensor in batch(i))
        mask = _packed_mask()[mine][:, torch.cat(FRONT_AND_BACK)]
        positions = POSITIONS[mine % (LENGTH // 2) if fault else mine]
        return cross_entropy(model(tokens, mask, positions), labels) / dist.get_world_size()

    model, local_step = trained(model, loss, after_backward=lambda: _sum_gradients(model))
    return model, lambda i: total(local_step(i))


def _window() -> Tensor:
    return causal(LENGTH).triu(-2)


def _window_reference() -> Built:
    model = build(AttentionModel)

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return cross_entropy(model(tokens, _window()), labels)

    return trained(model, loss)


def _without_mask(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """What a context-parallel attention got as its mask is taken for a causal one, and left out."""
    return arguments, {**keywords, "mask": None}


def _context_parallel_window(fault: bool) -> Built:
    model = build(partial(AttentionModel, ContextParallelAttention))
    if fault:
        model.attention.register_forward_pre_hook(_without_mask, with_kwargs=True)

    def loss(i: int) -> Tensor:
        tokens, labels = (own_part(tensor, 1) for tensor in batch(i))
        return cross_entropy(model(tokens, own_part(_window(), 0)), labels) / dist.get_world_size()

    model, local_step = trained(model, loss, after_backward=lambda: _sum_gradients(model))
    return model, lambda i: total(local_step(i))


def _weights(step: int) -> Tensor:
    """Which tokens count in the loss: the prompts, of other lengths, do not."""
    lengths = torch.arange(8) % 6 + step % 2
    return (torch.arange(LENGTH) >= lengths[:, None]).double()


def _masked_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * weights).sum()


def _masked_reference() -> Built:
    model = build(AttentionModel)

    def loss(i: int) -> Tensor:
        (tokens, labels), weights = batch(i), _weights(i)
        return _masked_loss(model(tokens, causal(LENGTH)), labels, weights) / weights.sum()

    return trained(model, loss)


def _masked(local_count: bool) -> Built:
    """DDP averages over the ranks of a sequence."""
    model = DistributedDataParallel(build(partial(AttentionModel, ContextParallelAttention)))

    def loss(i: int) -> Tensor:
        tokens, labels, weights = (own_part(tensor, 1) for tensor in (*batch(i), _weights(i)))
        value = _masked_loss(model(tokens, own_part(causal(LENGTH), 0)), labels, weights)
        count = weights.sum() if local_count else _weights(i).sum() / dist.get_world_size()
        return value / count

    return trained(model, loss)


def _data_parallel_group(fault: bool) -> Built:
    """One data-parallel replica of two context-parallel ranks. `fault`: DDP gets the data-parallel group, of one."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    attending = build(partial(AttentionModel, ContextParallelAttention))
    model = DistributedDataParallel(attending, process_group=groups[dist.get_rank()] if fault else None)

    def loss(i: int) -> Tensor:
        tokens, labels = (own_part(tensor, 1) for tensor in batch(i))
        return cross_entropy(model(tokens, own_part(causal(LENGTH), 0)), labels)

    return trained(model, loss)


def _causal_reference() -> Built:
    model = build(AttentionModel)

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return cross_entropy(model(tokens, causal(LENGTH)), labels)

    return trained(model, loss)


EXHIBITS = [
    Exhibit(
        name="norms under sequence parallelism, whose gradients nobody sums",
        report="NVIDIA/Megatron-LM#1446",
        said="With sequence parallelism, each tensor-parallel rank's final norm saw its part of the sequence. Its"
        " gradients stayed those of that part, other ones on each rank.",
        reference=feed_forward_reference,
        parallel=partial(_sequence_parallel, left_out=("norm",)),
        correct=_sequence_parallel,
        kinds=frozenset({"not reduced"}),
        module="norm",
        gather=gather_split_layers,
    ),
    Exhibit(
        name="an overlapped backward that multiplies by the wrong rank's weights",
        report="huggingface/nanotron#172",
        said="To overlap a gather, a row-parallel layer's backward multiplied its own positions' gradient by its"
        " weights and gathered the products: all ranks got the same input gradient, mostly of other ranks' weights.",
        reference=feed_forward_reference,
        parallel=partial(_sequence_parallel, OverlappedRowLinear),
        correct=_sequence_parallel,
        kinds=frozenset({"gradient"}),
        module="up",
        gather=gather_split_layers,
    ),
    Exhibit(
        name="the last label of each rank's part of a sequence, lost",
        report="huggingface/transformers#48570",
        said="Models dropped the labels that had been shifted before the sequence was cut, and shifted those of each"
        " part: the last token of every part had no target.",
        reference=_labels_reference,
        parallel=partial(_labels, shifted_locally=True),
        correct=partial(_labels, shifted_locally=False),
        kinds=frozenset({"labels"}),
    ),
    Exhibit(
        name="a later packed document, at the positions of the first",
        report="NVIDIA/Megatron-LM#5243",
        said="Under context parallelism, a rank looked up its tokens of each packed sequence from the start of the"
        " table of rotary positions, not from where that sequence begins.",
        reference=_packed_reference,
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
        reference=_window_reference,
        parallel=partial(_context_parallel_window, fault=True),
        correct=partial(_context_parallel_window, fault=False),
        kinds=frozenset({"mask"}),
        module="attention",
    ),
    Exhibit(
        name="a masked loss, divided by each part's own count",
        report="NVIDIA/Megatron-LM#7513",
        said="Each context-parallel rank divided its loss by its own count of tokens that count, and the gradients were"
        " then averaged. With prompts masked, the parts of a sequence count differently.",
        reference=_masked_reference,
        parallel=partial(_masked, local_count=True),
        correct=partial(_masked, local_count=False),
        kinds=frozenset({"counts"}),
    ),
    Exhibit(
        name="DDP over a group of one",
        report="ByteDance-Seed/VeOmni#1115",
        said="With all ranks on one sequence, the data-parallel group that DDP was given had one rank. Its all-reduce"
        " did nothing, and each rank trained on its part of the sequence.",
        reference=_causal_reference,
        parallel=partial(_data_parallel_group, fault=True),
        correct=partial(_data_parallel_group, fault=False),
        kinds=frozenset({"not reduced"}),
    ),
]
