"""Faults of copies: weights that begin differently, that were replaced, that nobody updates or nobody reads."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.small import (
    Net,
    Trained,
    alone,
    average_gradients,
    mesh,
    on_own_share,
    seeded,
    sgd,
    squared_error,
    train,
)


def _other_initial_weights(*, fault: bool) -> Trained:
    model = seeded(Net, seed=dist.get_rank() if fault else 0)

    def backward(number: int) -> Tensor:
        loss = squared_error(model, number, own=True)
        average_gradients(model)
        return loss

    return train(model, sgd(model), backward)


class _GlobalNorm(nn.BatchNorm1d):
    """Batch norm over the samples of all ranks."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(torch.cat(all_gather(inputs))).chunk(dist.get_world_size())[dist.get_rank()]


def _local_batch_norm(*, fault: bool) -> Trained:
    model = seeded(partial(Net, norm=nn.BatchNorm1d if fault else _GlobalNorm))
    return on_own_share(DistributedDataParallel(model))


def _optimizer_of_stale_parameters(*, fault: bool) -> Trained:
    model = seeded(Net)
    optimizer = sgd(model)
    fully_shard(model, mesh=mesh())
    if not fault:
        optimizer = sgd(model)

    def backward(number: int) -> Tensor:
        model.zero_grad()  # the optimizer's zero_grad reaches its own parameters only
        return squared_error(model, number, own=True)

    return train(model, optimizer, backward)


class _Averaged(nn.Module):
    """A net and the moving average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.average = Net().requires_grad_(False)
        self.average.load_state_dict(self.net.state_dict())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    @torch.no_grad()
    def follow(self, *, writes_back: bool = True) -> None:
        """Moves the average by a tenth towards the net. Sharded weights are made whole for it."""
        for average, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
            if not isinstance(average, DTensor):
                average.lerp_(weight, 0.1)
                continue
            assert isinstance(weight, DTensor)
            full = average.full_tensor().lerp_(weight.full_tensor(), 0.1)
            if writes_back:
                average.copy_(distribute_tensor(full, average.device_mesh, average.placements))


def _averaged(model: nn.Module, *, own: bool, writes_back: bool = True) -> Trained:
    _, update = train(model, sgd(model), lambda number: squared_error(model, number, own=own))

    def step(number: int) -> Tensor:
        loss = update(number)
        model.follow(writes_back=writes_back)
        return loss

    return model, step


def _average_alone() -> Trained:
    return _averaged(seeded(_Averaged), own=False)


def _average_not_written_back(*, fault: bool) -> Trained:
    model = seeded(_Averaged)
    fully_shard(model.net, mesh=mesh())
    fully_shard(model.average, mesh=mesh())
    return _averaged(model, own=True, writes_back=not fault)


EXHIBITS = [
    Exhibit(
        name="each rank begins with weights of its own",
        report="pytorch/torchtitan#166",
        said="Nobody seeded torch before the model was built and nothing was broadcast: the ranks trained different "
        "models with the same gradients, and the loss still went down.",
        reference=alone,
        parallel=partial(_other_initial_weights, fault=True),
        correct=partial(_other_initial_weights, fault=False),
        kinds=frozenset({"other random numbers"}),
    ),
    Exhibit(
        name="batch norm over a rank's own samples",
        report="open-mmlab/mmdetection#3621",
        said="The same global batch gave a precision of 0.75 on one GPU and 0.71 on four, because each batch norm saw "
        "its own GPU's two images.",
        reference=partial(alone, partial(Net, norm=nn.BatchNorm1d)),
        parallel=partial(_local_batch_norm, fault=True),
        correct=partial(_local_batch_norm, fault=False),
        kinds=frozenset({"forward"}),
        module="norm",
    ),
    Exhibit(
        name="an optimizer built before sharding",
        report="huggingface/accelerate#3209",
        said="The optimizer was given the parameters of the model that was not sharded yet. FSDP replaced them: the "
        "optimizer held tensors without gradients and updated nothing.",
        reference=alone,
        parallel=partial(_optimizer_of_stale_parameters, fault=True),
        correct=partial(_optimizer_of_stale_parameters, fault=False),
        kinds=frozenset({"stale weights"}),
    ),
    Exhibit(
        name="a moving average that is not written back",
        report="OpenRLHF/OpenRLHF#1357",
        said="The average of the weights was updated on gathered copies. They were not written back to the ranks' "
        "parts, and the next gather brought the old average.",
        reference=_average_alone,
        parallel=partial(_average_not_written_back, fault=True),
        correct=partial(_average_not_written_back, fault=False),
        kinds=frozenset({"stale weights"}),
    ),
]
