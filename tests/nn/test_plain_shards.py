"""Parameters of parallel layers are plain shards: what hand-written code does with them, and what marks survive."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorshard as ts
from rank_pool import RankError
from shards import full

DIMS = (0, 1, -1)


def _layers() -> list[tuple[nn.Module, nn.Module, int]]:
    """Of sizes that do not divide: the layer that is not parallel, the one that is, and the weight's own dimension."""
    torch.manual_seed(1)
    made: list[tuple[nn.Module, nn.Module, int]] = []
    for dim in DIMS:
        linear, embedding = nn.Linear(5, 7), nn.Embedding(7, 5)
        made.append((linear, ts.nn.ParallelLinear.from_linear(linear, dim), 1 if dim == 0 else 0))
        made.append((embedding, ts.nn.ParallelEmbedding.from_embedding(embedding, dim), dim))
    return made


def _by_hand() -> None:
    ts.init_process_group(2)
    for whole, layer, own_dim in _layers():
        part = ts.distributed.scatter(whole.weight.data, dim=own_dim)
        layer.weight.data.copy_(part)
        assert torch.equal(layer.weight, part) and torch.equal(
            ts.distributed.gather(layer.weight, own_dim), whole.weight
        )
        with torch.no_grad():
            layer.weight.zero_()
            layer.weight.copy_(part)
        nn.init.constant_(layer.weight, 3.0)
        assert (layer.weight == 3.0).all() and layer.weight.sum() == 3.0 * part.numel()
        ts.nn.init.shard_init_helper_(nn.init.normal_, layer.weight.data, std=2.0)
        torch.testing.assert_close(full(layer.weight).std(), torch.tensor(2.0), rtol=0.5, atol=0)
        layer.weight.data = part.clone()
        optimizer = torch.optim.AdamW(layer.parameters(), foreach=True)
        input = torch.arange(4) if isinstance(whole, nn.Embedding) else torch.randn(3, 5)
        dist.broadcast(input, 0)
        for module in (whole, layer):
            output = module(input)
            if output.size(-1) < 5 or (isinstance(whole, nn.Linear) and output.size(-1) < 7):
                output = ts.distributed.gather(output, dim=-1)
            output.square().sum().backward()
        torch.testing.assert_close(layer.weight.grad, ts.distributed.scatter(whole.weight.grad, dim=own_dim))
        optimizer.step()


def test_shards_are_set_compared_and_copied_by_hand(ranks):
    ranks(2, _by_hand)


def _copies() -> None:
    ts.init_process_group(2)
    column, row = ts.nn.ParallelLinear(5, 7, dim=1), ts.nn.ParallelLinear(5, 7, dim=0)
    row.bias.requires_grad_(False)
    column.tied = column.weight
    model = nn.Sequential(column, row, ts.nn.ParallelEmbedding(7, 5, dim=0))
    expected = [ts.get_parallel_dim(parameter) for parameter in model.parameters()]
    assert expected == [1, 1, 0, 0, 0] and getattr(row.weight, ts._PARALLEL_DIM) == 0
    saved = io.BytesIO()
    torch.save(model[0].weight, saved)
    saved.seek(0)
    assert ts.get_parallel_dim(torch.load(saved, weights_only=True)) == 1
    other = copy.deepcopy(model)
    assert other[0].tied is other[0].weight and not other[1].bias.requires_grad
    for change in (nn.Module.half, nn.Module.double, lambda module: module.to(torch.bfloat16)):
        other = change(other)
        assert [ts.get_parallel_dim(parameter) for parameter in other.parameters()] == expected
        state = ts.collect_state_dict(other)
        assert state["0.weight"].shape == (7, 5) and state["1.bias"].shape == (7,) and state["2.weight"].shape == (7, 5)
        for name, value in ts.collect_state_dict(model).items():
            torch.testing.assert_close(state[name], value.to(state[name].dtype), rtol=1e-2, atol=1e-2)
    other[0].weight = nn.Parameter(torch.zeros_like(other[0].weight))  # of the same shard: it is still known as one
    assert ts.get_parallel_dim(other[0].weight) == 1 and ts.collect_state_dict(other)["0.weight"].shape == (7, 5)
    meta = nn.Sequential(ts.nn.ParallelLinear(5, 7, dim=1, device="meta")).to_empty(device="cpu")
    assert ts.get_parallel_dim(meta[0].weight) == 1
    mark = ts.distributed.scatter(torch.ones(4, 2), dim=0)
    assert ts.get_parallel_dim(copy.deepcopy(mark)) == 0


def test_marks_survive_copies_and_conversions(ranks):
    ranks(2, _copies)


class _Marked(nn.Module):
    """A layer as TorchShard's template has it: a parameter, marked by the `dim` of the layer."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        whole = torch.arange(35.0).view(7, 5)
        part = whole if dim is None else ts.distributed.scatter(whole, dim=1 if dim == 0 else 0)
        self.weight = nn.Parameter(part.clone())
        self.bias = nn.Parameter(torch.ones(7) if dim in (0, None) else ts.distributed.scatter(torch.ones(7)).clone())
        ts.register_parallel_attribute(self.weight, dim, order_type=0)
        ts.register_parallel_dim(self.bias, dim)


def _marked_by_hand() -> None:
    ts.init_process_group(2)
    for dim in (*DIMS, None):
        model = _Marked(dim)
        assert ts.get_parallel_dim(model.weight) == ts.get_parallel_dim(model.bias) == dim
        state = ts.collect_state_dict(model, model.state_dict())
        assert torch.equal(state["weight"], torch.arange(35.0).view(7, 5)) and torch.equal(state["bias"], torch.ones(7))
        model.load_state_dict(ts.relocate_state_dict(model, state))
    table = nn.Parameter(torch.zeros(7, 3 if dist.get_rank() == 0 else 2))
    assert ts.get_parallel_dim(ts.register_parallel_attribute(table, 1, order_type=1)) == 1
    assert full(table).shape == (7, 5)
    for value, order, error in ((2, 0, ValueError), (2, 1, IndexError), (0, 2, ValueError)):
        with pytest.raises(error, match="was given"):
            ts.register_parallel_attribute(table, value, order)


def test_layers_marked_by_hand(ranks):
    ranks(2, _marked_by_hand)


def _load_anothers() -> None:
    ts.init_process_group(2)
    layer = ts.nn.ParallelLinear(4, 6, dim=1)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    sent = [saved.getvalue()]
    dist.broadcast_object_list(sent, src=0)
    state = torch.load(io.BytesIO(sent[0]), weights_only=True)
    layer.load_state_dict(state)


@pytest.mark.slow
def test_another_ranks_shards_are_refused(ranks):
    with pytest.raises(RankError, match="weight holds part 0 of 2, saved by another rank; this one has part 1 of 2"):
        ranks(2, _load_anothers)


def _norms(group_size: int) -> tuple[float, float]:
    ts.init_process_group(group_size)
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    layers = nn.Sequential(
        ts.nn.ParallelLinear.from_linear(whole[0], 1), ts.nn.ParallelLinear.from_linear(whole[1], 0), nn.Linear(5, 2)
    )
    whole.append(copy.deepcopy(layers[2]))
    x = torch.randn(3, 5)
    for model in (whole, layers):
        model(x).square().sum().backward()
    return tuple(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item() for model in (whole, layers))


@pytest.mark.parametrize(("world", "group_size"), [(1, 1), (2, 1), (2, 2)])
def test_the_norm_counts_all_shards_once(ranks, world, group_size):
    for whole, found in ranks(world, _norms, group_size):
        assert found == pytest.approx(whole, rel=1e-6)
