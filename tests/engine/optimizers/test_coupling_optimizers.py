"""Optimizers that look at whole tensors are exact under every plan: 20 steps as in one process."""

import os
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

import optimizers
import parity
import seeds
import tensorshard as ts
from tensorshard.models import GPT, next_token_loss

STEPS = 20
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, dict()),
    "zero1": (2, dict(zero=1)),
    "zero2": (2, dict(zero=2)),
    "zero3": (2, dict(zero=3)),
    "hybrid": (4, dict(zero=3, dp_replicate=2)),
    "tp": (2, dict(tp=2)),
    "tp_zero2": (4, dict(tp=2, zero=2)),
    "tp_zero3": (4, dict(tp=2, zero=3)),
    "pp": (2, dict(pp=2, micro_batches=2)),
    "pp_zero1": (4, dict(pp=2, zero=1, micro_batches=2)),
}
MAKERS: dict[str, Any] = {
    **optimizers.COUPLING,
    **optimizers.ELEMENTWISE,
    "muon_and_adamw": optimizers.muon_and_adamw,
}


def _model() -> GPT:
    seeds.seed(3)
    return GPT(61, 16, 2, 2, 36).double()


def _train(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    with in_double_precision():
        engine = ts.parallelize(_model(), ts.Plan(**fields), optimizer=MAKERS[kind], loss_fn=next_token_loss)
        if hasattr(engine.optimizer, "train"):
            engine.optimizer.train()
        losses = [engine.step(*parity.shard(engine, *parity.batch("gpt", step))).item() for step in range(STEPS)]
    return {"losses": losses, "state": engine.full_state_dict()}


def in_double_precision() -> Any:
    """A context in which torch's Muon computes in fp64: its bf16 would show how sums were rounded."""
    return mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double)


@cache
def alone(kind: str) -> dict[str, Any]:
    """What one process makes of it, without tensorshard."""
    model = _model()
    wants_names = kind == "muon_and_adamw"
    made = MAKERS[kind](model.named_parameters() if wants_names else model.parameters())
    each = made if isinstance(made, list) else [made]
    losses = []
    with in_double_precision():
        if hasattr(each[0], "train"):
            each[0].train()
        for step in range(STEPS):
            inputs, targets = parity.batch("gpt", step)
            total, count = next_token_loss(model(inputs), targets)
            (total / count).backward()
            losses.append((total / count).item())
            for optimizer in each:
                optimizer.step()
                optimizer.zero_grad()
    return {"losses": losses, "state": model.state_dict()}


def _cases() -> list[Any]:
    """Each optimizer under one plan or more, and each plan with one or more of them."""
    fast = {"zero1-lamb", "zero3-muon", "tp-adafactor", "tp_zero3-eight_bits", "pp_zero1-muon_and_adamw"}
    whole = "TENSORSHARD_WHOLE_GRID" in os.environ  # all of them take many minutes
    cases = []
    for place, plan in enumerate(PLANS):
        for number, kind in enumerate(MAKERS):
            name = f"{plan}-{kind}"
            if name in fast or whole or (3 * place + number) % 9 == 0:
                marks = () if name in fast else (pytest.mark.slow,)
                cases.append(pytest.param(plan, kind, id=name, marks=marks))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("plan, kind", _cases())
def test_20_steps_are_those_of_one_process(ranks, plan, kind):
    world_size, fields = PLANS[plan]
    found, *others = ranks(world_size, _train, kind, fields)
    expected = alone(kind)
    parity.assert_same(found, expected, 1e-5)
    assert all(other["losses"] == found["losses"] for other in others)
    start = _model().state_dict()
    moved = {name: (value - start[name]).norm() / 0.1 for name, value in expected["state"].items()}
    # Hundreds of times the bound. A key's bias has no gradient, and some optimizers do not move what begins as zeros.
    assert sum(value > 1e-3 for value in moved.values()) > len(moved) / 3
