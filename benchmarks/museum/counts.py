"""Faults of losses and of gradient accumulation: what a mean is over, how often it is divided, which gradients stay."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.small import (
    Net,
    Trained,
    Words,
    alone,
    average_gradients,
    batch,
    mesh,
    padded_tokens,
    seeded,
    sgd,
    share,
    token_loss,
    train,
)

_UNEVEN_RANKS = [8, 7, 8, 6, 1, 2, 1, 1]  # ranks 0 and 1 have 29 and 5 targets
_UNEVEN_MICRO_BATCHES = [8, 7, 1, 2, 7, 8, 2, 1]  # both ranks have 18 targets, 15 in their first micro-batch


def _words(lengths: list[int]) -> Trained:
    model = seeded(Words)

    def backward(number: int) -> Tensor:
        tokens, targets = padded_tokens(number, lengths)
        loss = token_loss(model(tokens), targets)
        loss.backward()
        return loss

    return train(model, sgd(model), backward)


def _mean_of_means_over_ranks(*, fault: bool) -> Trained:
    model = DistributedDataParallel(seeded(Words))

    def backward(number: int) -> Tensor:
        tokens, targets = map(share, padded_tokens(number, _UNEVEN_RANKS))
        count = (targets != -100).sum()
        if not fault:
            dist.all_reduce(count)
            count = count / dist.get_world_size()  # DDP divides the sum over the ranks again
        loss = token_loss(model(tokens), targets, "sum") / count
        loss.backward()
        return loss

    return train(model, sgd(model), backward)


def _mean_of_means_over_micro_batches(*, fault: bool) -> Trained:
    model = DistributedDataParallel(seeded(Words))

    def backward(number: int) -> Tensor:
        tokens, targets = map(share, padded_tokens(number, _UNEVEN_MICRO_BATCHES))
        count = (targets != -100).sum()
        loss = torch.zeros((), dtype=torch.float64)
        for some_tokens, some_targets in zip(tokens.chunk(2), targets.chunk(2), strict=True):
            if fault:
                part = token_loss(model(some_tokens), some_targets) / 2
            else:
                part = token_loss(model(some_tokens), some_targets, "sum") / count
            part.backward()
            loss += part.detach()
        return loss

    return train(model, sgd(model), backward)


class _Accelerator:
    """Divides each loss by the number of micro-batches before its backward pass."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches

    def backward(self, loss: Tensor) -> None:
        (loss / self.micro_batches).backward()


def _divided_twice(*, fault: bool) -> Trained:
    model = DistributedDataParallel(seeded(Net))
    accelerator = _Accelerator(micro_batches=2)

    def backward(number: int) -> Tensor:
        inputs, targets = map(share, batch(number))
        losses = []
        for some_inputs, some_targets in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            loss = F.mse_loss(model(some_inputs), some_targets)
            losses.append(loss.detach())
            accelerator.backward(loss / 2 if fault else loss)  # the trainer divides, too
        return torch.stack(losses).mean()

    return train(model, sgd(model), backward)


def _averaged_though_whole(*, fault: bool) -> Trained:
    model = seeded(Words)
    fully_shard(model, mesh=mesh())

    def backward(number: int) -> Tensor:
        tokens, targets = map(share, padded_tokens(number, _UNEVEN_RANKS))
        count = (targets != -100).sum()
        dist.all_reduce(count)
        loss = token_loss(model(tokens), targets, "sum") / count
        (loss if fault else loss * dist.get_world_size()).backward()  # FSDP takes the mean over the ranks
        return loss.detach() * dist.get_world_size()

    return train(model, sgd(model), backward)


class _PartitionedGradients:
    """ZeRO-2's gradients: a backward pass at a boundary of the accumulation hands over what was kept and forgets it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: dict[str, Tensor] = {}
        self.averaged: dict[str, Tensor] = {}

    def backward(self, loss: Tensor, *, boundary: bool) -> None:
        self.model.zero_grad()
        loss.backward()
        average_gradients(self.model)
        for name, parameter in self.model.named_parameters():
            self.kept[name] = self.kept.get(name, 0) + parameter.grad
        if boundary:
            self.averaged, self.kept = self.kept, {}

    def hand_over(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.averaged[name]


def _only_the_last_micro_batch(*, fault: bool) -> Trained:
    model = seeded(Net)
    gradients = _PartitionedGradients(model)

    def backward(number: int) -> Tensor:
        inputs, targets = map(share, batch(number))
        losses = []
        for index in range(2):
            loss = F.mse_loss(model(inputs.chunk(2)[index]), targets.chunk(2)[index])
            # The engine was told of no accumulation, so that each of its backward passes is a boundary.
            gradients.backward(loss / 2, boundary=fault or index == 1)
            losses.append(loss.detach())
        gradients.hand_over()
        return torch.stack(losses).mean()

    return train(model, sgd(model), backward)


EXHIBITS = [
    Exhibit(
        name="each rank's loss is a mean over its own tokens",
        report="huggingface/transformers#34242",
        said="Each rank divided its loss by its own number of targets, and DDP averaged the ranks. "
        "A token of a rank with few targets weighed more than one of a rank with many.",
        reference=partial(_words, _UNEVEN_RANKS),
        parallel=partial(_mean_of_means_over_ranks, fault=True),
        correct=partial(_mean_of_means_over_ranks, fault=False),
        kinds=frozenset({"counts"}),
    ),
    Exhibit(
        name="each micro-batch's loss is a mean over its own tokens",
        report="huggingface/transformers#34191",
        said="Gradient accumulation averaged the means of micro-batches that hold different numbers of targets, "
        "so that the update depended on how a batch was cut.",
        reference=partial(_words, _UNEVEN_MICRO_BATCHES),
        parallel=partial(_mean_of_means_over_micro_batches, fault=True),
        correct=partial(_mean_of_means_over_micro_batches, fault=False),
        kinds=frozenset({"counts"}),
    ),
    Exhibit(
        name="gradients divided by the accumulation twice",
        report="huggingface/accelerate#3533",
        said="The trainer divided the loss by the number of micro-batches, and so did the backward call that it used.",
        reference=alone,
        parallel=partial(_divided_twice, fault=True),
        correct=partial(_divided_twice, fault=False),
        kinds=frozenset({"scaled"}),
    ),
    Exhibit(
        name="a global mean that FSDP averages once more",
        report="meta-pytorch/torchtune#2172",
        said="The loss was already divided by the number of targets of all ranks. FSDP took the mean over the ranks "
        "on top, so that gradients shrank with the number of ranks.",
        reference=partial(_words, _UNEVEN_RANKS),
        parallel=partial(_averaged_though_whole, fault=True),
        correct=partial(_averaged_though_whole, fault=False),
        kinds=frozenset({"scaled"}),
    ),
    Exhibit(
        name="accumulation that keeps the last micro-batch only",
        report="allenai/open-instruct#1498",
        said="With an accumulation of 1 in its configuration, ZeRO-2 took each backward pass for the last one and "
        "forgot the gradients of the passes before.",
        reference=alone,
        parallel=partial(_only_the_last_micro_batch, fault=True),
        correct=partial(_only_the_last_micro_batch, fault=False),
        kinds=frozenset({"gradient", "other samples"}),
    ),
]
