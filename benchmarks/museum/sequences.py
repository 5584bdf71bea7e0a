"""Silent faults where each rank has a part of every sequence."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.museum.collectives import gather_parts, own_part, sum_and_scatter, total, whole
from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.language_model import (
    LENGTH,
    AttentionModel,
    Built,
    FeedForwardModel,
    attention_reference,
    batch,
    build,
    causal,
    cross_entropy,
    feed_forward_reference,
    trained,
)
from benchmarks.museum.split_layers import (
    ColumnLinear,
    ContextParallelAttention,
    RowLinear,
    gather_split_layers,
    sequence_parallel,
)


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

    return sequence_parallel(model, loss, lambda name: not name.startswith(("up", "down.weight", *left_out)))


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

    return sequence_parallel(model, loss)


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
        reference=partial(attention_reference, causal(LENGTH)),
        parallel=partial(_data_parallel_group, fault=True),
        correct=partial(_data_parallel_group, fault=False),
        kinds=frozenset({"not reduced"}),
    ),
]
