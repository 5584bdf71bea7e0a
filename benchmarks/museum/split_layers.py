"""Layers that are split over the ranks by hand, without a fault."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.museum.collectives import copy_to_ranks, gather_parts, own_part, sum_over_ranks, total, whole
from benchmarks.museum.language_model import Attention, Built, causal, rotate, trained


def gather_split_layers(name: str, part: Tensor) -> Tensor:
    """Makes a part whole: the layers "down" and "out" are split by their inputs, all others by their outputs."""
    return whole(part, 1 if name.split(".")[-2] in {"down", "out"} else 0)


class ColumnLinear(nn.Linear):
    """A linear layer of which each rank computes a part of the outputs."""

    def __init__(self, layer: nn.Linear, copy: Callable[[Tensor], Tensor] = copy_to_ranks) -> None:
        super().__init__(layer.in_features, layer.out_features, dtype=torch.float64)
        self.weight = nn.Parameter(own_part(layer.weight.detach(), 0).clone())
        self.bias = None if layer.bias is None else nn.Parameter(own_part(layer.bias.detach(), 0).clone())
        self.copy = copy

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(self.copy(inputs), self.weight, self.bias)


class RowLinear(nn.Linear):
    """A linear layer of which each rank has a part of the inputs. All ranks have its bias."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, dtype=torch.float64)
        self.weight = nn.Parameter(own_part(layer.weight.detach(), 1).clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return sum_over_ranks(F.linear(inputs, self.weight)) + self.bias


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


def sequence_parallel(
    model: nn.Module, loss: Callable[[int], Tensor], summed: Callable[[str], bool] = lambda _name: True
) -> Built:
    """The model and its step, where each rank's loss is its part of the sequence's. `summed`: which gradients are."""

    def sum_gradients() -> None:
        for name, parameter in model.named_parameters():
            if summed(name):
                dist.all_reduce(parameter.grad)

    model, step = trained(model, loss, after_backward=sum_gradients)
    return model, lambda i: total(step(i))
