"""Faults of optimizers that look at a whole parameter, and see a part of it."""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.small import (
    Net,
    Trained,
    average_gradients,
    mesh,
    seeded,
    share,
    squared_error,
    train,
)


def _adamw(parameters: Iterable[nn.Parameter] | list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, weight_decay=0.1)


def _decaying_matrices(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with weight decay for what has two dimensions: no biases, no norms."""
    parameters = list(parameters)
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    return _adamw([{"params": decayed}, {"params": others, "weight_decay": 0.0}])


def _decay_alone() -> Trained:
    model = seeded(Net)
    return train(model, _decaying_matrices(model.parameters()), lambda number: squared_error(model, number))


def _decay_by_dimensions_of_flat_parts(*, fault: bool) -> Trained:
    model = seeded(Net)
    parts = []
    for parameter in model.parameters():  # ZeRO-1: the optimizer has this rank's part of each parameter, a view of it
        values = parameter.data.view(-1) if fault else parameter.data
        parts.append(nn.Parameter(share(values)))
    optimizer = _decaying_matrices(parts)

    def step(number: int) -> Tensor:
        model.zero_grad()
        loss = squared_error(model, number, own=True)
        average_gradients(model)
        for part, parameter in zip(parts, model.parameters(), strict=True):
            part.grad = share(parameter.grad.view(-1) if fault else parameter.grad)
        optimizer.step()
        for parameter in model.parameters():
            for owner, part in enumerate(parameter.data.view(-1).chunk(dist.get_world_size())):
                dist.broadcast(part, src=owner)
        return loss.detach()

    return model, step


class _Matrices(nn.Module):
    """Two matrices: 8 features in, 4 out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False)
        self.last = nn.Linear(16, 4, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


def _orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, by five steps of Newton and Schulz."""
    iterate = matrix / matrix.norm()
    for _ in range(5):
        square = iterate @ iterate.T
        iterate = 3.4445 * iterate + (-4.7750 * square + 2.0315 * square @ square) @ iterate
    return iterate


class _Muon(torch.optim.Optimizer):
    """Muon (Jordan, 2024) for matrices; `by_shard` orthogonalises what a rank has of each."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, by_shard: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.95})
        self.by_shard = by_shard

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                if not isinstance(parameter, DTensor):
                    parameter.sub_(_orthogonal(momentum), alpha=group["lr"])
                elif self.by_shard:
                    parameter.to_local().sub_(_orthogonal(momentum.to_local()), alpha=group["lr"])
                else:
                    update = distribute_tensor(
                        _orthogonal(momentum.full_tensor()), parameter.device_mesh, parameter.placements
                    )
                    parameter.sub_(update, alpha=group["lr"])


def _muon_alone() -> Trained:
    model = seeded(_Matrices)
    return train(model, _Muon(model.parameters()), lambda number: squared_error(model, number))


def _muon_of_shards(*, fault: bool) -> Trained:
    model = parallelize_module(seeded(_Matrices), mesh(), {"first": ColwiseParallel(), "last": RowwiseParallel()})
    return train(model, _Muon(model.parameters(), by_shard=fault), lambda number: squared_error(model, number))


class _OneScaleEach(torch.optim.Optimizer):
    """Adam with one second moment for each parameter: the mean of its gradient's squares, as Adam-mini's blocks have.

    Args:
        ranks: over how many processes it believes that a parameter is sharded.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, ranks: int = 1) -> None:
        super().__init__(parameters, {"lr": 0.01, "beta": 0.9})
        self.ranks = ranks

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.grad.to_local() if isinstance(parameter, DTensor) else parameter.grad
                sums = torch.stack([local.square().sum(), torch.tensor(float(local.numel()), dtype=local.dtype)])
                if self.ranks > 1:
                    dist.all_reduce(sums)
                moment = self.state[parameter].setdefault("moment", torch.zeros((), dtype=local.dtype))
                moment.lerp_(sums[0] / sums[1], 1 - group["beta"])
                weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                weight.addcdiv_(local, moment.sqrt() + 1e-4, value=-group["lr"])


def _one_scale_alone() -> Trained:
    model = seeded(Net)
    return train(model, _OneScaleEach(model.parameters()), lambda number: squared_error(model, number))


def _one_scale_of_shards(*, fault: bool) -> Trained:
    model = seeded(Net)
    fully_shard(model, mesh=mesh())
    # The fault asks how many devices this process sees, which is one.
    optimizer = _OneScaleEach(model.parameters(), ranks=1 if fault else dist.get_world_size())
    return train(model, optimizer, lambda number: squared_error(model, number, own=True))


_UPDATE = frozenset({"update"})

EXHIBITS = [
    Exhibit(
        name="weight decay chosen by the dimensions of flat parts",
        report="mlfoundations/open_clip#358",
        said="Weight decay is for what has two dimensions. Sharded parameters are flat, so that the rule took all of "
        "them for biases and norms.",
        reference=_decay_alone,
        parallel=partial(_decay_by_dimensions_of_flat_parts, fault=True),
        correct=partial(_decay_by_dimensions_of_flat_parts, fault=False),
        kinds=_UPDATE,
    ),
    Exhibit(
        name="Muon orthogonalises each shard",
        report="deepspeedai/DeepSpeed#8437",
        said="With tensor parallelism, Muon's iteration ran on each rank's part of a matrix. Gradients agreed to 7e-7, "
        "the updates differed by 39 %.",
        reference=_muon_alone,
        parallel=partial(_muon_of_shards, fault=True),
        correct=partial(_muon_of_shards, fault=False),
        kinds=_UPDATE,
    ),
    Exhibit(
        name="a block's second moment over a rank's shard",
        report="zyushun/Adam-mini#42",
        said="The optimizer counted the GPUs that its process sees for the world's size, which is 1 where each rank "
        "sees its own: the mean of squares of a block split by FSDP was each shard's.",
        reference=_one_scale_alone,
        parallel=partial(_one_scale_of_shards, fault=True),
        correct=partial(_one_scale_of_shards, fault=False),
        kinds=_UPDATE,
    ),
]
