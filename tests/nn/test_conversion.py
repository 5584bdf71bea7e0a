"""Converting a model's linear layers."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorshard.distributed as tsd
from rank_pool import RankError
from shards import full
from tensorshard.nn import ParallelLinear


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.down.weight.requires_grad_(False)


def _convert() -> None:
    tsd.init_process_group(2)
    block = _Block().eval()
    before = copy.deepcopy(block)
    assert ParallelLinear.convert_parallel_linear(block, 1, ["u*"]) is block
    assert ParallelLinear.convert_parallel_linear(block, dim=0, names="down") is block
    assert (block.up.dim, block.down.dim) == (1, 0)
    assert type(block.attention.out_proj) is type(before.attention.out_proj)
    assert not block.down.weight.requires_grad and not block.up.training
    torch.testing.assert_close(full(block.up.weight), before.up.weight)
    x = torch.randn(3, 4)
    torch.testing.assert_close(block.down(block.up(x)), before.down(before.up(x)))
    alone = ParallelLinear.convert_parallel_linear(nn.Linear(4, 8), dim=-1)
    assert isinstance(alone, ParallelLinear) and alone.dim == -1
    all_of_it = ParallelLinear.convert_parallel_linear(copy.deepcopy(before), dim=1)
    assert all_of_it.up.dim == all_of_it.down.dim == 1
    tied = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    tied["b"].weight = tied["a"].weight
    ParallelLinear.convert_parallel_linear(tied, dim=1)
    assert tied["a"].weight is tied["b"].weight and tied["a"].bias is not tied["b"].bias


def test_conversion(ranks):
    ranks(2, _convert)


def _convert_badly(case: str) -> None:
    tsd.init_process_group(2)
    dist.barrier()
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "up": nn.Linear(4, 8), "head": nn.Linear(4, 8)})
    if case == "twice":
        ParallelLinear.convert_parallel_linear(model, 1)
        ParallelLinear.convert_parallel_linear(model, 1)
    elif case == "twice by name":
        ParallelLinear.convert_parallel_linear(model, 1)
        ParallelLinear.convert_parallel_linear(model, 0, ["head"])
    elif case == "itself":
        ParallelLinear.convert_parallel_linear(ParallelLinear(4, 8, dim=1), 0)
    elif case == "name":
        ParallelLinear.convert_parallel_linear(model, 1, ["up", "haed"])
    elif case == "embedding":
        ParallelLinear.convert_parallel_linear(model, 1, ["embed"])
    elif case == "dim":
        ParallelLinear.convert_parallel_linear(model, 2)
    else:
        model["head"].weight = model["embed"].weight
        try:
            ParallelLinear.convert_parallel_linear(model, 1)
        finally:
            assert type(model["up"]) is nn.Linear  # nothing was changed


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("twice", "already converted: head, up. A layer is converted once"),
        ("twice by name", "already converted: head"),
        ("itself", "already converted: the module itself"),
        ("name", r"'haed' names no nn.Linear of the model; it has: up, head"),
        ("embedding", r"'embed' names no nn.Linear of the model"),
        ("dim", r"dim=2 was given for convert_parallel_linear: use 0 \(rows\), 1 or -1"),
        ("tied", "head.weight is tied to embed.weight, which is not converted"),
    ],
)
def test_bad_conversions(ranks, case, message):
    with pytest.raises(RankError, match=message):
        ranks(2, _convert_badly, case)
