"""Split layers inside DistributedDataParallel, with torch's GradScaler and ZeroRedundancyOptimizer."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import tensorshard.distributed as tsd
from rank_pool import RankError
from tensorshard.compat.state import collect_state_dict
from tensorshard.distributed.ddp import register_ddp_parameters_to_ignore
from tensorshard.nn import ParallelCrossEntropyLoss, ParallelLinear


class _Classifier(nn.Module):
    """The way of the TorchShard article: data parallel up to a last layer that is split over everyone."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.fc = nn.Linear(5, classes)
        self.batches = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).tanh()
        if self.batches is not None:
            x = tsd.gather(x, 0, grad_scale=self.batches)
        return self.fc(x)


def _train_under_ddp(group_size: int, dim: int) -> None:
    tsd.init_process_group(group_size)
    torch.manual_seed(0)
    reference = _Classifier(7)
    model = copy.deepcopy(reference)
    model.batches = tsd.get_group_size()
    ParallelLinear.convert_parallel_linear(model, dim, ["fc"])
    names = register_ddp_parameters_to_ignore(model)
    assert names == (["fc.weight", "fc.bias"] if dim else ["fc.weight"])
    ddp = DistributedDataParallel(model)
    criterion = ParallelCrossEntropyLoss()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (ddp, reference)]
    for step in range(4):
        torch.manual_seed(step)
        world, rank = dist.get_world_size(), dist.get_rank()
        x, targets = torch.randn(3 * world, 6), torch.randint(7, (3 * world,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x), targets).backward()
        mine = torch.arange(3 * rank, 3 * rank + 3)
        output = ddp(x[mine])
        criterion(output, tsd.gather(targets[mine], dim=0)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, value in collect_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize(("world_size", "group_size"), [(2, 2), (4, 2)])
def test_under_ddp(ranks, world_size, group_size, dim):
    ranks(world_size, _train_under_ddp, group_size, dim)


def _ddp_of_a_bare_layer() -> None:
    tsd.init_process_group(2)
    layer = nn.Sequential(nn.Linear(2, 4), ParallelLinear(4, 2, dim=0))
    assert register_ddp_parameters_to_ignore(layer[1]) == ["weight"]
    assert register_ddp_parameters_to_ignore(layer) == ["1.weight"]
    DistributedDataParallel(layer)(torch.ones(1, 2)).sum().backward()


def _ddp_with_unknown_groups() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = ParallelLinear(4, 2, dim=0, group=pairs[dist.get_rank() // 2])
    register_ddp_parameters_to_ignore(layer)


def test_names_for_ddp(ranks):
    ranks(2, _ddp_of_a_bare_layer)
    with pytest.raises(RankError, match="weight is split over 2 of 4 ranks, which are not a group of"):
        ranks(4, _ddp_with_unknown_groups)


def _amp_and_zero() -> None:
    """Split parameters may have an optimizer of their own; one scaler serves both."""
    tsd.init_process_group(2)
    torch.manual_seed(0)
    model = _Classifier(7)
    model.batches = 2
    ParallelLinear.convert_parallel_linear(model, -1, ["fc"])
    ddp = DistributedDataParallel(model)
    split = list(model.fc.parameters())
    body = [p for p in model.parameters() if all(p is not other for other in split)]
    optimizers = [
        ZeroRedundancyOptimizer(body, torch.optim.SGD, lr=0.1, momentum=0.9),
        torch.optim.SGD(split, lr=0.1, momentum=0.9),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    losses = []
    for step in range(12):
        torch.manual_seed(dist.get_rank())
        x, targets = torch.randn(4, 6), torch.randint(7, (4,))
        with torch.autocast("cpu", torch.bfloat16):
            output = ddp(x)
            loss = ParallelCrossEntropyLoss()(output, tsd.gather(targets, dim=0))
        losses.append(loss.item())
        scaler.scale(loss).backward()
        if step == 5 and dist.get_rank() == 1:
            model.fc.weight.grad[0, 0] = torch.inf
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if step < 5 else 2.0)  # one rank's overflow is everyone's
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


def test_amp_and_zero(ranks):
    ranks(2, _amp_and_zero)
