"""Faults of the step around the update: schedules, counters, and steps that not all ranks leave out."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR

from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.small import Net, Trained, batch, mesh, seeded, sgd, share, squared_error, train


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.1)


def _scheduled(model: nn.Module, *, own: bool, times: int = 1) -> Trained:
    optimizer = sgd(model)
    scheduler = ExponentialLR(optimizer, 0.8)
    _, update = train(model, optimizer, lambda number: squared_error(model, number, own=own))

    def step(number: int) -> Tensor:
        loss = update(number)
        for _ in range(times):
            scheduler.step()
        return loss

    return model, step


def _schedule_alone() -> Trained:
    return _scheduled(seeded(Net), own=False)


def _schedule_of_all_ranks(*, fault: bool) -> Trained:
    model = DistributedDataParallel(seeded(Net))
    return _scheduled(model, own=True, times=dist.get_world_size() if fault else 1)


def _adam_alone() -> Trained:
    model = seeded(Net)
    return train(model, _adamw(model), lambda number: squared_error(model, number))


def _step_that_makes_states(*, fault: bool) -> Trained:
    model = seeded(Net)
    fully_shard(model, mesh=mesh())
    optimizer = _adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    optimizer.step()  # makes the states, for a checkpoint to be loaded into, and moves nothing
    for group, (rate, decay) in zip(optimizer.param_groups, settings, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    if not fault:
        for state in optimizer.state.values():
            state["step"].zero_()
    return train(model, optimizer, lambda number: squared_error(model, number, own=True))


class _Scores(nn.Module):
    """A score for each of 16 tokens; the layer after the embedding has one row, which the first rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.score = nn.Linear(8, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.embedding(tokens)).sum(-1)


def _scaled(model: nn.Module, overflows: Callable[[bool], bool], *, own: bool) -> Trained:
    """Loss scaling as fp16 needs it: a step whose scaled gradients overflow is left out."""
    optimizer = sgd(model)

    def step(number: int) -> Tensor:
        tokens, targets = torch.arange(16), batch(number)[0].flatten()[:16]
        weights = torch.ones(16, dtype=torch.float64)
        weights[0] = 1e4 if number == 1 else 1.0  # an outlier among the samples of the second step
        if own:
            tokens, targets, weights = share(tokens), share(targets), share(weights)
        optimizer.zero_grad()
        loss = (weights * (model(tokens) - targets).square()).mean()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        if not overflows(any(bool((1024 * gradient).half().isinf().any()) for gradient in local)):
            optimizer.step()
        return loss.detach()

    return model, step


def _scaler_alone() -> Trained:
    return _scaled(seeded(_Scores), bool, own=False)


def _scaler_of_one_rank(*, fault: bool) -> Trained:
    model = seeded(_Scores)
    fully_shard(model, mesh=mesh())

    def anywhere(here: bool) -> bool:
        flag = torch.tensor(float(here))
        copy = flag.clone()  # the fault takes the flag before the reduction has written it
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(copy if fault else flag)

    return _scaled(model, anywhere, own=True)


_UPDATE = frozenset({"update"})

EXHIBITS = [
    Exhibit(
        name="a learning-rate schedule that is as many times too fast as there are ranks",
        report="huggingface/transformers#24088",
        said="The schedule's length already counted the ranks, and the prepared scheduler made one step for each of "
        "them after every update.",
        reference=_schedule_alone,
        parallel=partial(_schedule_of_all_ranks, fault=True),
        correct=partial(_schedule_of_all_ranks, fault=False),
        kinds=_UPDATE,
    ),
    Exhibit(
        name="a step that only makes the states, and is counted",
        report="NVIDIA/Megatron-LM#5974",
        said="The optimizer's states were made by a step with zero gradients. Adam counted it: the first real update "
        "had the bias correction of the second, and was 1.34 times too small.",
        reference=_adam_alone,
        parallel=partial(_step_that_makes_states, fault=True),
        correct=partial(_step_that_makes_states, fault=False),
        kinds=_UPDATE,
    ),
    Exhibit(
        name="an overflow that only its own rank hears of",
        report="pytorch/pytorch#115710",
        said="The flag of an overflow was read before its reduction had ended. The rank that had it left the step out, "
        "the others updated their shards.",
        reference=_scaler_alone,
        parallel=partial(_scaler_of_one_rank, fault=True),
        correct=partial(_scaler_of_one_rank, fault=False),
        kinds=_UPDATE,
    ),
]
