"""Silent faults of tensor parallelism whose activations are the same on all ranks."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.museum.collectives import copy_to_ranks, sum_over_ranks
from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.language_model import (
    Built,
    FeedForwardModel,
    batch,
    build,
    cross_entropy,
    feed_forward_reference,
    trained,
)
from benchmarks.museum.split_layers import ColumnLinear, RowLinear, gather_split_layers


class BiasOnEachRank(RowLinear):
    def forward(self, inputs: Tensor) -> Tensor:
        return sum_over_ranks(F.linear(inputs, self.weight, self.bias))


class DividedBias(RowLinear):
    def forward(self, inputs: Tensor) -> Tensor:
        return sum_over_ranks(F.linear(inputs, self.weight, self.bias / dist.get_world_size()))


def _row_parallel(down: type[RowLinear]) -> Built:
    model = build(FeedForwardModel)
    model.up, model.down = ColumnLinear(model.up), down(model.down)

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return cross_entropy(model(tokens), labels)

    return trained(model, loss)


class _CopyThatReducesACopy(torch.autograd.Function):
    """Sums the gradient where it is contiguous. Of another one, it sums a contiguous copy, which it then drops."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient.contiguous())
        return gradient


class SequenceFirst(ColumnLinear):
    """A column-parallel layer that computes ``[length, batch, ...]`` of inputs ``[batch, length, ...]``."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(self.copy(inputs).transpose(0, 1).contiguous(), self.weight)


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0, local: bool = False) -> Tensor:
    """The mean cross-entropy of logits ``[..., classes / ranks]``. `local`: smoothing is over a rank's own classes."""
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    shifted = logits - highest[..., None]
    log_sum = sum_over_ranks(shifted.exp().sum(-1)).log()
    labels = labels - dist.get_rank() * logits.shape[-1]
    mine = (labels >= 0) & (labels < logits.shape[-1])
    chosen = shifted.gather(-1, labels.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
    losses = log_sum - sum_over_ranks(chosen * mine)
    if smoothing:
        mean = shifted.mean(-1) if local else sum_over_ranks(shifted.mean(-1)) / dist.get_world_size()
        losses = (1 - smoothing) * losses + smoothing * (log_sum - mean)
    return losses.mean()


def _vocabulary_parallel(smoothing: float = 0.0, local: bool = False) -> Built:
    model = build(FeedForwardModel)
    model.head = ColumnLinear(model.head)

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return vocabulary_cross_entropy(model(tokens), labels, smoothing, local)

    return trained(model, loss)


def _sequence_first(fault: bool) -> Built:
    model = build(FeedForwardModel)
    model.head = SequenceFirst(model.head, _CopyThatReducesACopy.apply if fault else copy_to_ranks)

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return vocabulary_cross_entropy(model(tokens), labels.transpose(0, 1))

    return trained(model, loss)


def _dropout(loading_ranks: int) -> Built:
    """The first `loading_ranks` ranks make an iterator of a loader, which takes a number of torch's generator."""
    parallel = dist.is_initialized()
    model = build(partial(FeedForwardModel, dropout=0.25))
    if parallel:
        model.up, model.down = ColumnLinear(model.up), RowLinear(model.down)
    torch.manual_seed(1)

    def loss(i: int) -> Tensor:
        pairs = list(zip(*batch(i), strict=True))
        tokens, labels = (torch.zeros_like(tensor).contiguous() for tensor in batch(i))
        if not parallel or dist.get_rank() < loading_ranks:
            tokens, labels = next(iter(DataLoader(pairs, batch_size=len(pairs))))
        if parallel:
            dist.broadcast(tokens, 0)
            dist.broadcast(labels, 0)
        return cross_entropy(model(tokens), labels)

    return trained(model, loss)


EXHIBITS = [
    Exhibit(
        name="the bias of a row-parallel layer, added on each rank",
        report="PaddlePaddle/Paddle#35186",
        said="A row-parallel linear layer added its bias before the all-reduce, so that the sum had it once a rank.",
        reference=feed_forward_reference,
        parallel=partial(_row_parallel, BiasOnEachRank),
        correct=partial(_row_parallel, RowLinear),
        kinds=frozenset({"forward"}),
        module="down",
        gather=gather_split_layers,
    ),
    Exhibit(
        name="a bias divided by the degree, and its gradient with it",
        report="pytorch/torchtitan#4332",
        said="Each rank added its bias divided by the tensor-parallel degree before the sum. The forward was right, but"
        " autograd divided each copy's gradient, too, and no sum over the ranks made up for it.",
        reference=feed_forward_reference,
        parallel=partial(_row_parallel, DividedBias),
        correct=partial(_row_parallel, RowLinear),
        kinds=frozenset({"scaled"}),
        module="down",
        gather=gather_split_layers,
    ),
    Exhibit(
        name="an input gradient that is summed into a copy",
        report="NVIDIA/Megatron-LM#5337",
        said="In front of a head that is split by classes, backward all-reduced a contiguous copy of a transposed"
        " gradient and returned the gradient itself: everything below trained on one rank's part.",
        reference=feed_forward_reference,
        parallel=partial(_sequence_first, fault=True),
        correct=partial(_sequence_first, fault=False),
        kinds=frozenset({"not reduced"}),
        module="norm",
        gather=gather_split_layers,
    ),
    Exhibit(
        name="labels smoothed over a rank's own classes",
        report="NVIDIA/Megatron-LM#7464",
        said="The cross-entropy of logits that are split by classes took its label smoothing's mean over the local"
        " classes in place of all of them.",
        reference=partial(feed_forward_reference, smoothing=0.2),
        parallel=partial(_vocabulary_parallel, smoothing=0.2, local=True),
        correct=partial(_vocabulary_parallel, smoothing=0.2),
        kinds=frozenset({"labels"}),
        module="head",
        gather=gather_split_layers,
    ),
    Exhibit(
        name="dropout that drifts apart where one rank loads the data",
        report="bigscience-workshop/Megatron-DeepSpeed#276",
        said="Only the first tensor-parallel rank iterated the data loader, which drew its workers' seed from torch's"
        " generator. From then on, activations that all ranks share had other dropout masks on that rank.",
        reference=partial(_dropout, loading_ranks=1),
        parallel=partial(_dropout, loading_ranks=1),
        correct=partial(_dropout, loading_ranks=2),
        kinds=frozenset({"other random numbers"}),
        module="dropout",
        gather=gather_split_layers,
    ),
]
