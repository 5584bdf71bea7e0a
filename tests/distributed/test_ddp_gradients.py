"""Gradients of models that gather and scatter inside of DistributedDataParallel."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tensorshard as ts
from rank_pool import RankError
from shards import full


class _Roundtrip(nn.Module):
    """Gathers samples and scatters them again, with parameters before, between and after; or the other way round."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        x = first(x).tanh()
        if self.how == "own samples":
            x = ts.distributed.gather(x, dim=0)
            x = second(x).tanh()
            return third(ts.distributed.scatter(x, dim=0))
        if self.how == "same samples":
            x = ts.distributed.scatter(x, dim=0)
            x = second(x).tanh()
            return third(ts.distributed.gather(x, dim=0))
        # Features: gathered along another dimension, so that there is nothing to make up for.
        x = ts.distributed.gather(ts.distributed.scatter(x, dim=-1) * 2, dim=-1)
        return third(second(x).tanh())


def _roundtrip(how: str, group_size: int) -> None:
    ts.init_process_group(group_size)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = _Roundtrip(how)
    whole = copy.deepcopy(model)
    first, second, third = whole.layers
    factor = 2 if how == "features" else 1
    x = torch.randn(4 * world, 3)
    if how == "own samples":
        mine = x[4 * rank : 4 * rank + 4]
    else:
        mine = x.chunk(world // group_size)[rank // group_size]
    ddp = DistributedDataParallel(model)
    ddp(mine).square().mean().backward()
    third(second(first(x).tanh() * factor).tanh()).square().mean().backward()
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("how", ["own samples", "same samples", "features"])
@pytest.mark.parametrize(("world", "group_size"), [(2, 2), (4, 2)])
def test_gradients_through_gather_and_scatter(ranks, world, group_size, how):
    ranks(world, _roundtrip, how, group_size)


class _Gathering(nn.Module):
    def __init__(self, reentrant: bool | None = None, **options) -> None:
        super().__init__()
        self.reentrant, self.options = reentrant, options
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.reentrant is None:
            return self.gathered(x)
        return checkpoint(self.gathered, x, use_reentrant=self.reentrant)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(ts.distributed.gather(x.tanh(), dim=0, **self.options))


def _gradient(wrap: bool, reentrant: bool | None = None, group=None, **options) -> torch.Tensor:
    torch.manual_seed(0)
    model = _Gathering(reentrant, **options)
    call = DistributedDataParallel(model, process_group=group) if wrap else model
    call(torch.full((2, 3), 1.0 + dist.get_rank())).square().mean().backward()
    return model.body.weight.grad


def _scales() -> None:
    ts.init_process_group(2)
    automatic = _gradient(True)
    torch.testing.assert_close(_gradient(True, grad_scale=2.0), automatic)
    torch.testing.assert_close(_gradient(True, grad_scale=1.0), automatic / 2)  # what TorchShard computes
    torch.testing.assert_close(_gradient(True, False), automatic)
    torch.testing.assert_close(_gradient(True, True, grad_scale=2.0), automatic)
    alone = _gradient(False)  # nobody averages, so that this rank's part is what it is
    dist.all_reduce(alone)
    torch.testing.assert_close(alone, automatic)
    over_itself = _gradient(True, group=ts.distributed.get_data_parallel_group())
    torch.testing.assert_close(over_itself, _gradient(False))
    # A parameter that is put together inside the forward holds no samples.
    layer = ts.nn.ParallelLinear(3, 4, dim=1, bias=False)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.plain = layer, nn.Linear(3, 3)

        def forward(self, x):
            return nn.functional.linear(self.plain(x), ts.distributed.gather(self.layer.weight, dim=0))

    x = torch.ones(2, 3)
    model = Tied()
    DistributedDataParallel(model)(x).sum().backward()
    expected = model.plain(x).sum(0).expand(4, 3)
    torch.testing.assert_close(full(layer.weight.grad, layer.weight), expected)
    _gradient(True, True)


def test_who_averages(ranks):
    with pytest.raises(RankError, match=r"being computed again by torch.utils.checkpoint with use_reentrant=True"):
        ranks(2, _scales)


class _CosineHead(nn.Module):
    """Puts a head's normalised weight together in forward: what is gathered there are no samples."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).tanh()
        if not self.parallel:
            return nn.functional.linear(x, nn.functional.normalize(self.head.weight))
        weight = nn.functional.normalize(self.head.weight)
        return nn.functional.linear(ts.distributed.gather(x, dim=0), ts.distributed.gather(weight, dim=0))


def _gathered_weights(group_size: int) -> None:
    ts.init_process_group(group_size)
    torch.manual_seed(0)
    model, whole = _CosineHead(True), _CosineHead(False)
    whole.load_state_dict(model.state_dict())
    ts.nn.ParallelLinear.convert_parallel_linear(model, 1, ["head"])
    x = torch.randn(2 * dist.get_world_size(), 3)
    ddp = DistributedDataParallel(model)
    ddp(x[2 * dist.get_rank() :][:2]).square().mean().backward()
    whole(x).square().mean().backward()
    torch.testing.assert_close(model.body.weight.grad, whole.body.weight.grad)
    torch.testing.assert_close(full(model.head.weight.grad, model.head.weight), whole.head.weight.grad)


@pytest.mark.parametrize("world", [2, 4])
def test_weights_gathered_in_forward(ranks, world):
    ranks(world, _gathered_weights, 2)


def _accumulate(group_size: int) -> None:
    """Three backwards that DDP does not synchronize, and one of nothing that it does."""
    ts.init_process_group(group_size)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6))
    model = copy.deepcopy(whole)
    ts.nn.ParallelLinear.convert_parallel_linear(model, 0, ["1"])
    ddp = DistributedDataParallel(model)
    for x in torch.randn(3, 2 * ts.distributed.get_data_parallel_size(), 4):
        with ddp.no_sync():
            ddp(x[2 * ts.distributed.get_data_parallel_rank() :][:2]).square().mean().backward()
        whole(x).square().mean().backward()
    ddp(torch.zeros(1, 4)).mul(0).sum().backward()
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(found.grad, found), expected.grad)


def test_accumulation(ranks):
    ranks(2, _accumulate, 2)
    ranks(4, _accumulate, 2)


def _others_are_ignored_still() -> None:
    ts.init_process_group(2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ts.nn.ParallelLinear.convert_parallel_linear(model, 0, ["1"])
    DistributedDataParallel(model)
    assert set(model._ddp_params_and_buffers_to_ignore) == {"0.weight", "1.weight"}


def test_what_others_registered_stays_registered(ranks):
    ranks(2, _others_are_ignored_still)


def _wrapped_without_registering(group_size: int) -> None:
    ts.init_process_group(group_size)
    model = nn.Sequential(nn.Linear(4, 4), ts.nn.ParallelLinear(4, 6, dim=0))
    DistributedDataParallel(model)(torch.full((2, 4), 1.0 + dist.get_rank() // group_size)).sum().backward()
    gradients = [torch.empty(6, 4) for _ in range(dist.get_world_size())]
    dist.all_gather(gradients, full(model[1].weight.grad, model[1].weight))
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_wrapping_registers_what_was_forgotten(ranks):
    ranks(2, _wrapped_without_registering, 2)
    ranks(4, _wrapped_without_registering, 2)
