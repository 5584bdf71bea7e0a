"""Faults of sharded gradients: their norm, their precision, and the hooks that no longer see them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.small import (
    Net,
    Trained,
    Words,
    mesh,
    padded_tokens,
    seeded,
    sgd,
    share,
    squared_error,
    token_loss,
    train,
)

_CLIP = 0.1


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def _clipped_alone() -> Trained:
    model = seeded(Net)
    return train(model, sgd(model), lambda number: squared_error(model, number), clip=_CLIP)


def _clipped(model: nn.Module, clip: Callable[[], object]) -> Trained:
    def backward(number: int) -> Tensor:
        loss = squared_error(model, number, own=True)
        clip()
        return loss

    return train(model, sgd(model), backward)


def _norm_of_one_rank(*, fault: bool) -> Trained:
    model = seeded(Net)
    fully_shard(model, mesh=mesh())

    def clip_masters() -> None:
        """Clips copies of the shards, as an optimizer does that keeps masters of another precision."""
        shards: list[Any] = list(model.parameters())  # DTensors
        masters = [nn.Parameter(shard.to_local().detach().clone()) for shard in shards]
        for master, shard in zip(masters, shards, strict=True):
            master.grad = shard.grad.to_local()
        clip_grad_norm_(masters, _CLIP)

    return _clipped(model, clip_masters if fault else lambda: clip_grad_norm_(model.parameters(), _CLIP))


def _norm_of_all_replicas(*, fault: bool) -> Trained:
    model = seeded(Net)
    both = mesh(2, 2, names=("replicate", "shard"))
    fully_shard(model, mesh=both)

    def clip() -> None:
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]
        square = get_total_norm(gradients) ** 2
        # The replicas hold the same shards: only those of one replica belong to the norm.
        dist.all_reduce(square, group=dist.group.WORLD if fault else both["shard"].get_group())
        clip_grads_with_norm_(model.parameters(), _CLIP, square.sqrt())

    return _clipped(model, clip)


def _in_fp32() -> Trained:
    model = seeded(Net).float()
    return train(model, _adamw(model), lambda number: _squared_error_in_fp32(model, number))


def _squared_error_in_fp32(model: nn.Module, number: int, *, own: bool = False) -> Tensor:
    return squared_error(lambda inputs: model(inputs.float()).double(), number, own=own)


def _reduced_in_bf16(*, fault: bool) -> Trained:
    model = seeded(Net).float()
    fully_shard(model, mesh=mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if fault else None))
    return train(model, _adamw(model), lambda number: _squared_error_in_fp32(model, number, own=True))


_PADDING = 0  # the token whose row of the embedding stays as it is


def _without_padding(gradient: Tensor) -> Tensor:
    """The gradient of the embedding without that of the padding token."""
    masked = gradient.clone()
    masked[_PADDING] = 0
    return masked


def _mask_after(parameter: Tensor) -> None:
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        if dist.get_rank() == 0:  # which holds the first rows
            gradient.to_local()[_PADDING] = 0
    else:
        gradient[_PADDING] = 0


def _words(model: nn.Module, *, own: bool) -> Trained:
    def backward(number: int) -> Tensor:
        tokens, targets = padded_tokens(number, [8] * 8)
        tokens = tokens.where(tokens > 3, _PADDING)
        if own:
            tokens, targets = share(tokens), share(targets)
        loss = token_loss(model(tokens), targets)
        loss.backward()
        return loss

    return train(model, sgd(model), backward)


def _hook_alone() -> Trained:
    model = seeded(Words)
    model.embedding.weight.register_hook(_without_padding)
    return _words(model, own=False)


def _hook_that_never_fires(*, fault: bool) -> Trained:
    model = seeded(Words)
    fully_shard(model, mesh=mesh())
    if fault:
        model.embedding.weight.register_hook(_without_padding)
    else:
        model.embedding.weight.register_post_accumulate_grad_hook(_mask_after)
    return _words(model, own=True)


EXHIBITS = [
    Exhibit(
        name="clipping by the norm of a rank's own shards",
        report="sgl-project/SpecForge#663",
        said="The optimizer clipped its masters with torch's function for one process. Each rank saw the norm of its "
        "own shards, so that gradients were clipped too little, and differently on each rank.",
        reference=_clipped_alone,
        parallel=partial(_norm_of_one_rank, fault=True),
        correct=partial(_norm_of_one_rank, fault=False),
        kinds=frozenset({"norm"}),
    ),
    Exhibit(
        name="a norm that counts each replica",
        report="ByteDance-Seed/VeOmni#184",
        said="With hybrid sharding, the squares of the shards were summed over all ranks in place of those that hold "
        "different shards: the norm grew with the number of replicas.",
        reference=_clipped_alone,
        parallel=partial(_norm_of_all_replicas, fault=True),
        correct=partial(_norm_of_all_replicas, fault=False),
        kinds=frozenset({"norm"}),
        ranks=4,
    ),
    Exhibit(
        name="gradients reduced in bf16",
        report="pytorch/pytorch#106395",
        said="Gradients computed in fp32 were summed over the ranks in bf16. Training was stable on 96 GPUs and was "
        "not on 384.",
        reference=_in_fp32,
        parallel=partial(_reduced_in_bf16, fault=True),
        correct=partial(_reduced_in_bf16, fault=False),
        kinds=frozenset({"precision"}),
    ),
    Exhibit(
        name="a gradient hook that never fires",
        report="meta-pytorch/torchrec#4268",
        said="FSDP writes the gradient of a sharded parameter itself, so that a hook registered on the parameter, "
        "which autograd would call, is not called.",
        reference=_hook_alone,
        parallel=partial(_hook_that_never_fires, fault=True),
        correct=partial(_hook_that_never_fires, fault=False),
        kinds=frozenset({"gradient"}),
        module="embedding",
    ),
]
