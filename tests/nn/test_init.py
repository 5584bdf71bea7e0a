"""Initial values of split parameters."""

import torch
import torch.distributed as dist
from torch import nn

import tensorshard as ts
from shards import full


def _initial_values(group_size: int) -> None:
    """As TorchShard's tests do it: every rank with a seed of its own."""
    ts.init_process_group(group_size)
    torch.manual_seed(5 + dist.get_rank())
    for dim in (0, 1):
        layer = ts.nn.ParallelLinear(6, 8, dim=dim)
        seed = torch.Generator().manual_seed(5 + dist.get_rank())
        ts.nn.init.shard_init_helper_(nn.init.normal_, layer.weight, std=0.5, generator=seed)
        ts.nn.init.shard_init_helper_(nn.init.uniform_, layer.bias, generator=seed)
        first = torch.Generator().manual_seed(5 + dist.get_rank() // group_size * group_size)
        weight = nn.init.normal_(torch.empty(8, 6), std=0.5, generator=first)
        bias = nn.init.uniform_(torch.empty(8), generator=first)
        assert torch.equal(full(layer.weight), weight)
        assert torch.equal(full(layer.bias), bias)
        assert dim == 1 or torch.equal(layer.bias, bias)


def test_initial_values_are_the_first_ranks(ranks):
    ranks(4, _initial_values, 2)
