"""A fault of tied weights: two uses of one parameter that are sharded apart."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.small import Trained, average_gradients, padded_tokens, seeded, sgd, share, token_loss, train

_VOCABULARY = 25  # 13 rows on rank 0 and 12 on rank 1


class _Unshard(torch.autograd.Function):
    """The whole weight from the ranks' padded buffers; backward, this rank's rows of the mean gradient."""

    @staticmethod
    def forward(ctx, weight: Tensor, buffer: Tensor) -> Tensor:
        ctx.rows = len(weight)
        parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, buffer)
        return torch.cat(parts)[:_VOCABULARY]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        begin = dist.get_rank() * -(-_VOCABULARY // dist.get_world_size())
        return gradient[begin : begin + ctx.rows] / dist.get_world_size(), None


class _Unit:
    """What one unit of a sharded model keeps of a weight: a buffer of as many rows as the largest part has."""

    def __init__(self, weight: nn.Parameter) -> None:
        rows = -(-_VOCABULARY // dist.get_world_size())
        self.weight = weight
        self.buffer = weight.data
        if len(weight) < rows:  # only then is a padded copy needed, of which the weight becomes a view
            self.buffer = F.pad(weight.data, (0, 0, 0, rows - len(weight)))
            weight.data = self.buffer[: len(weight)]

    def whole(self) -> Tensor:
        return _Unshard.apply(self.weight, self.buffer)


class _Rows(nn.Embedding):
    """An embedding, whole or with its rows on the ranks."""

    def __init__(self) -> None:
        super().__init__(_VOCABULARY, 16)
        self.units: list[_Unit] = []

    def shard(self, *, units: int) -> None:
        self.weight.data = self.weight.data.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.units = [_Unit(self.weight) for _ in range(units)]

    def whole(self, unit: int) -> Tensor:
        return self.units[unit].whole() if self.units else self.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.whole(0))


class _Tied(nn.Module):
    """A language model whose embedding is its head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = _Rows()
        self.hidden = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.hidden(self.embedding(tokens.flatten()))), self.embedding.whole(-1))


def _tied_alone() -> Trained:
    model = seeded(_Tied)

    def backward(number: int) -> Tensor:
        tokens, targets = padded_tokens(number, [8] * 8)
        loss = token_loss(model(tokens), targets)
        loss.backward()
        return loss

    return train(model, sgd(model), backward)


def _tied_in_two_units(*, fault: bool) -> Trained:
    model = seeded(_Tied)
    model.embedding.shard(units=2 if fault else 1)

    def backward(number: int) -> Tensor:
        tokens, targets = map(share, padded_tokens(number, [8] * 8))
        loss = token_loss(model(tokens), targets)
        loss.backward()
        average_gradients(model.hidden)
        return loss

    return train(model, sgd(model), backward)


def _rows_of_all_ranks(name: str, part: Tensor) -> Tensor:
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return torch.cat(parts)


EXHIBITS = [
    Exhibit(
        name="tied weights of which one use never sees the last rank's updates",
        report="pytorch/pytorch#176076",
        said="An embedding tied to the head was sharded in two units. Where the vocabulary is no multiple of the "
        "ranks, the last rank's part is a padded copy: the optimizer updated that of one unit, the other had its own.",
        reference=_tied_alone,
        parallel=partial(_tied_in_two_units, fault=True),
        correct=partial(_tied_in_two_units, fault=False),
        kinds=frozenset({"stale weights"}),
        module="embedding",
        gather=_rows_of_all_ranks,
    ),
]
