"""`verify` of mixtures under ``ep``: exact as they are, and each fault that is known of such layouts is found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parity
import seeds
import tensorshard as ts
from injected_faults import planted
from tensorshard.comm.sharding import to_local
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.trainer.launch.launch_errors import RankFailedError

EXPERTS = 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, 12) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, 8) / 3)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for k in range(chosen.size(1)):
            hidden = torch.einsum("tf,tfh->th", x, self.up[chosen[:, k]]).relu()
            result = result + weights[:, k, None] * torch.einsum("th,thf->tf", hidden, self.down[chosen[:, k]])
        return result


class Mixture(nn.Module):
    """No token chooses the last half of the experts, which one of two ranks has."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, EXPERTS // 2), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x.flatten(0, 1)).softmax(-1).topk(1)
        return x + self.experts(x.flatten(0, 1), chosen, weights).view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def balance(output: torch.Tensor) -> torch.Tensor:
    """The balance loss of Switch Transformers, as if the output were a router's."""
    logits = output.flatten(0, 1)
    shares = F.one_hot(logits.argmax(-1), logits.size(-1)).float().mean(0)
    return (shares * logits.softmax(-1).mean(0)).sum()


_balance: Callable[[torch.Tensor], torch.Tensor] = balance


def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, targets) + _balance(output)


def _whole_balance(engine: Any) -> None:
    """What a user writes after parallelize."""
    globals()["_balance"] = engine.over_whole_batch(balance)


def _router_lost(engine: Any) -> None:
    def lose(name: str, gradient: torch.Tensor) -> None:
        if ".router." in name:
            to_local(gradient).zero_()

    engine.register_gradient_hook(lose)


def _local_balance(engine: Any) -> None:
    globals()["_balance"] = balance


def _experts_counted_twice(engine: Any) -> None:
    counted = engine._gradients._num_shards
    for name, master in engine.sharded.masters().items():
        if ".experts." in name:
            counted[master] *= 2


def _experts_without_tokens_stay(engine: Any) -> None:
    def experts() -> dict[torch.Tensor, torch.Tensor]:
        return {p: p.detach().clone() for n, p in engine.model.named_parameters() if ".experts." in n}

    def step(inputs: Any, targets: Any) -> Any:
        before = experts()
        loss = original(inputs, targets)
        after = experts()
        with torch.no_grad():
            for parameter in before:
                parameter.copy_((before if engine.mesh.dp_rank == 1 else after)[parameter])
        return loss

    original, engine.step = engine.step, step


def _routed_otherwise_again(engine: Any) -> None:
    def turn(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output.flip(-1) if is_in_backward() else None

    for name, module in engine.model.named_modules():
        if name.endswith("router"):
            module.register_forward_hook(turn)


# name: what plants it, and the kinds of culprit that may name it
FAULTS: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "a router's gradient is lost": (_router_lost, ("gradient",)),
    "balance losses are of each rank's tokens": (_local_balance, ("labels", "counts")),
    "the norm counts experts twice": (_experts_counted_twice, ("norm",)),
    "experts without tokens are not updated": (_experts_without_tokens_stay, ("stale weights",)),
}


def _verify(plant: Callable[[Any], None], fields: dict[str, Any]) -> ts.Verification:
    def plant_both(engine: Any) -> None:
        _whole_balance(engine)
        plant(engine)

    random = seeds.generator(6)
    inputs, targets = torch.randn(8, 6, 8, generator=random), torch.randn(8, 6, 3, generator=random)
    with planted(plant_both):
        return ts.verify(
            Model,
            ts.Plan(ep=2, recompute="full", **fields),
            inputs=inputs,
            targets=targets,
            optimizer=parity.ADAMW,
            loss_fn=loss_fn,
            shrink=False,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [dict(zero=1, micro_batches=2, clip_grad_norm=0.1), dict(zero=3, micro_batches=2)],
    ids=["zero1-micro2", "zero3-micro2"],
)
def test_right_layouts(fields):
    found = _verify(lambda engine: None, fields)
    assert found, found.describe()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault):
    plant, kinds = FAULTS[fault]
    found = _verify(plant, dict(zero=0, **({"clip_grad_norm": 0.1} if kinds == ("norm",) else {})))
    assert not found
    assert found.culprit is not None and found.culprit.kind in kinds, found.describe()


@pytest.mark.slow
def test_recomputation_that_routes_otherwise_is_refused():
    with pytest.raises(
        RankFailedError, match=r"block 'blocks.\d' \(Mixture\) computes other values when its forward runs"
    ):
        _verify(_routed_otherwise_again, dict(zero=0))
