"""Faults of reductions: gradients of which some or all stayed with their rank."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.small import (
    Net,
    Trained,
    alone,
    batch,
    mesh,
    on_own_share,
    seeded,
    sgd,
    share,
    squared_error,
    train,
)


def _last_micro_batch_without_reduction(*, fault: bool) -> Trained:
    model = DistributedDataParallel(seeded(Net))

    def backward(number: int) -> Tensor:
        inputs, targets = map(share, batch(number))
        losses = []
        for index in range(2):
            # Meant was: reduce with the last of the two. The fault counts from 0 here and from 1 where it updates.
            reduces = (index if fault else index + 1) % 2 == 0
            with nullcontext() if reduces else model.no_sync():
                loss = F.mse_loss(model(inputs.chunk(2)[index]), targets.chunk(2)[index]) / 2
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return train(model, sgd(model), backward)


def _around_the_wrapper(*, fault: bool) -> Trained:
    model = DistributedDataParallel(seeded(Net))

    def backward(number: int) -> Tensor:
        return squared_error(model.module if fault else model, number, own=True)

    return train(model, sgd(model), backward)


def _replaced_parameter(*, fault: bool) -> Trained:
    net = seeded(Net)

    def replace() -> None:
        net.last.weight = nn.Parameter(net.last.weight.detach().clone())

    if not fault:
        replace()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    if fault:
        replace()
    return on_own_share(model)


def _unfreezing(model: nn.Module, net: nn.Module, *, own: bool) -> Trained:
    """The first layer is frozen for one step, as fine-tuning begins with a frozen backbone."""

    def backward(number: int) -> Tensor:
        net.first.requires_grad_(number > 0)
        return squared_error(model, number, own=own)

    return train(model, sgd(model), backward)


def _frozen_at_first() -> Trained:
    model = seeded(Net)
    return _unfreezing(model, model, own=False)


def _unfrozen_after_ddp(*, fault: bool) -> Trained:
    net = seeded(Net)
    net.first.requires_grad_(not fault)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    return _unfreezing(model, net, own=True)


class _WithAuxiliary(nn.Module):
    """A net with a second output that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.auxiliary = nn.Linear(8, 4)

    def forward(self, inputs: Tensor, auxiliary: bool) -> Tensor:
        return self.net(inputs) + self.auxiliary(inputs) if auxiliary else self.net(inputs)


def _auxiliary(model: nn.Module, number: int, index: int, *, own: bool) -> Tensor:
    """The loss of one micro-batch of two after its backward pass; the first of them uses the auxiliary layer."""
    inputs, targets = (tensor.view(2, 4, -1)[index] for tensor in batch(number))
    if own:
        inputs, targets = share(inputs), share(targets)
    loss = F.mse_loss(model(inputs, index == 0), targets) / 2
    loss.backward()
    return loss.detach()


def _used_by_the_first_micro_batch() -> Trained:
    model = seeded(_WithAuxiliary)
    return train(model, sgd(model), lambda number: sum(_auxiliary(model, number, i, own=False) for i in range(2)))


class _Reducer:
    """Averages each gradient over the ranks as soon as a backward pass has added to it, where `reduces` is true."""

    def __init__(self, model: nn.Module) -> None:
        self.reduces = True
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, parameter: Tensor) -> None:
        if self.reduces:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _unused_in_the_reduced_pass(*, fault: bool) -> Trained:
    model = seeded(_WithAuxiliary)
    reducer = _Reducer(model)

    def backward(number: int) -> Tensor:
        reducer.reduces = not fault  # only once a step, with the last micro-batch
        loss = _auxiliary(model, number, 0, own=True)
        reducer.reduces = True
        return loss + _auxiliary(model, number, 1, own=True)

    return train(model, sgd(model), backward)


class _Adapted(nn.Module):
    """A frozen linear layer with a trained update of rank 2 beside it, as LoRA has."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(5)
        self.down = nn.Parameter(torch.randn(2, 8, generator=generator, dtype=torch.float64) / 8)
        self.up = nn.Parameter(torch.randn(16, 2, generator=generator, dtype=torch.float64) / 8)

    def forward(self, inputs: Tensor) -> Tensor:
        down, up = (p.to_local() if isinstance(p, DTensor) else p for p in (self.down, self.up))
        return self.base(inputs) + inputs @ down.T @ up.T


def _adapted_alone() -> Trained:
    model = seeded(Net).requires_grad_(False)
    model.first = _Adapted(model.first)
    return train(model, sgd(model), lambda number: squared_error(model, number))


def _mean_of_replicas(parameter: Tensor) -> None:
    gradient = parameter.grad.to_local()
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def _adapters_after_fsdp(*, fault: bool) -> Trained:
    model = seeded(Net).requires_grad_(False)
    for layer in (model.first, model.norm, model.last):
        fully_shard(layer, mesh=mesh())
    model.first = _Adapted(model.first)
    for name in ("down", "up"):
        replica = DTensor.from_local(getattr(model.first, name).detach(), mesh(), [Replicate()])
        setattr(model.first, name, nn.Parameter(replica))
        if not fault:
            getattr(model.first, name).register_post_accumulate_grad_hook(_mean_of_replicas)
    return on_own_share(model)


_NOT_REDUCED = frozenset({"not reduced"})

EXHIBITS = [
    Exhibit(
        name="no reduction in the micro-batch that updates",
        report="modelscope/FunASR#3472",
        said="The condition of no_sync was off by one against that of the update: the first micro-batch was reduced, "
        "the last one was not, and each rank updated with gradients of its own.",
        reference=alone,
        parallel=partial(_last_micro_batch_without_reduction, fault=True),
        correct=partial(_last_micro_batch_without_reduction, fault=False),
        kinds=_NOT_REDUCED,
    ),
    Exhibit(
        name="a forward that goes around DDP",
        report="jingyaogong/minimind#854",
        said="The loss was computed by model.module, which does not arm DDP's hooks. Nothing was reduced.",
        reference=alone,
        parallel=partial(_around_the_wrapper, fault=True),
        correct=partial(_around_the_wrapper, fault=False),
        kinds=_NOT_REDUCED,
    ),
    Exhibit(
        name="a parameter replaced after DDP was built",
        report="pytorch/pytorch#12603",
        said="DDP's hooks stayed with the parameter that it had been given. The one that replaced it was not reduced.",
        reference=alone,
        parallel=partial(_replaced_parameter, fault=True),
        correct=partial(_replaced_parameter, fault=False),
        kinds=_NOT_REDUCED,
        module="last",
    ),
    Exhibit(
        name="a backbone unfrozen after DDP was built",
        report="Lightning-AI/pytorch-lightning#20340",
        said="DDP reduces what is trained when it is built. What a callback unfroze later stayed with each rank.",
        reference=_frozen_at_first,
        parallel=partial(_unfrozen_after_ddp, fault=True),
        correct=partial(_unfrozen_after_ddp, fault=False),
        kinds=_NOT_REDUCED,
        module="first",
    ),
    Exhibit(
        name="a layer that the reduced micro-batch does not use",
        report="pytorch/pytorch#69031",
        said="With find_unused_parameters, DDP reduces what the last micro-batch used. Gradients that earlier ones had "
        "left in other parameters stayed local.",
        reference=_used_by_the_first_micro_batch,
        parallel=partial(_unused_in_the_reduced_pass, fault=True),
        correct=partial(_unused_in_the_reduced_pass, fault=False),
        kinds=_NOT_REDUCED,
        module="auxiliary",
    ),
    Exhibit(
        name="adapters added after FSDP",
        report="hao-ai-lab/FastVideo#1666",
        said="LoRA's parameters were added to a model that was sharded already, as replicated DTensors. FSDP does not "
        "know them: their gradients were labelled as replicated and were each rank's own.",
        reference=_adapted_alone,
        parallel=partial(_adapters_after_fsdp, fault=True),
        correct=partial(_adapters_after_fsdp, fault=False),
        kinds=_NOT_REDUCED,
        module="first",
    ),
]
