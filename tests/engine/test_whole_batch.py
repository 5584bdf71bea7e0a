"""Functions of the whole batch: balance losses of routers are those of one process."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parity
import seeds
import tensorshard as ts
from log_lines import logged

STEPS = 4


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    seeds.seed(8)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.5)
    config.output_router_logits = True
    return MixtralForCausalLM(config)


def texts(step: int) -> dict[str, torch.Tensor]:
    """Samples with different numbers of labels."""
    random = seeds.generator(20 + step)
    tokens = torch.randint(1, 64, (8, 12), generator=random)
    is_text = torch.arange(12) < torch.randint(4, 13, (8, 1), generator=random)
    return {
        "input_ids": tokens,
        "labels": tokens.where(is_text, -100),
        "attention_mask": is_text.long(),
    }


def _train_mixtral(fields: dict[str, Any]) -> dict[str, Any]:
    engine = ts.parallelize(mixtral, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=ts.model_loss)
    with logged() as lines:
        losses = [
            engine.step(*parity.shard(engine, batch, batch["labels"])).item() for batch in map(texts, range(STEPS))
        ]
    last = texts(STEPS)
    evaluated = engine.evaluate(*parity.shard(engine, last, last["labels"])).item()
    return {"losses": [*losses, evaluated], "state": engine.full_state_dict(), "lines": lines}


# id: (ranks, fields of the plan)
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1-micro2": (2, dict(zero=1, micro_batches=2)),
    "zero3-full": (2, dict(zero=3, recompute="full")),
    "zero0-micro4": (1, dict(zero=0, micro_batches=4)),
    "ep2": (2, dict(ep=2, zero=1)),
    "2xep2-zero3-micro2-full": (4, dict(ep=2, zero=3, micro_batches=2, recompute="full")),
    "ep2-tp2-zero2-micro2": (4, dict(ep=2, tp=2, zero=2, micro_batches=2)),
    "2-replicas-ep2-offload": (4, dict(dp_replicate=2, dp_shard=2, ep=2, zero=1, offload="cpu")),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_losses_that_models_of_transformers_balance_routers_by(ranks, plan):
    model, losses = mixtral(), []
    optimizer = parity.ADAMW(model.parameters())
    for batch in map(texts, range(STEPS)):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model.eval()(**texts(STEPS)).loss.item())
    world_size, fields = PLANS[plan]
    found = ranks(world_size, _train_mixtral, fields)
    assert found[0]["losses"] == pytest.approx(losses, rel=1e-6)
    parity.assert_same_state(found[0]["state"], model.state_dict(), 1e-5)
    assert not [line for line in found[0]["lines"] if "over_whole_batch" in line]


def balance(logits: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The loss of Switch Transformers and the z-loss, over the tokens in `mask`."""
    logits = logits.flatten(0, -2)
    kept = torch.ones(len(logits)) if mask is None else mask.flatten().float()
    shares = (F.one_hot(logits.argmax(-1), logits.size(-1)) * kept[:, None]).sum(0) / kept.sum()
    means = (logits.softmax(-1) * kept[:, None]).sum(0) / kept.sum()
    return (shares * means).sum() * logits.size(-1) + 0.1 * (logits.logsumexp(-1).square() * kept).sum() / kept.sum()


def _routed(output: torch.Tensor, targets: torch.Tensor, whole: Any = balance, kind: str = "mean") -> Any:
    fit = (output - targets).square().mean(-1)
    mask = (targets.abs().sum(-1) < 3).float()
    if kind == "mean":
        return fit.mean() + whole(output)
    counted = (fit * mask).sum(), mask.sum()
    return counted[0] + whole(output, mask) * counted[1], counted[1]


def _pairs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randn(2, 8, 5, 4, generator=seeds.generator(40 + step)).unbind()
    return inputs, targets[..., :3]


def _router() -> nn.Module:
    seeds.seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def _train_router(fields: dict[str, Any], kind: str, style: str, wraps: bool = True) -> dict[str, Any]:
    wrapped: list[Any] = [balance]

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> Any:
        return _routed(output, targets, wrapped[0], kind)

    def loss_of(model: Any, batch: Any) -> Any:
        return {"all": loss_fn(model(batch[0]), batch[1])}

    chosen = loss_of if style == "model" else loss_fn
    engine = ts.parallelize(_router(), ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=chosen)
    if wraps:
        wrapped[0] = engine.over_whole_batch(balance)
    losses = []
    with logged() as lines:
        for step in range(STEPS):
            inputs, targets = parity.shard(engine, *_pairs(step))
            if style == "loop":
                loss = loss_fn(engine.model(inputs), targets)
                losses.append(engine.backward(loss).item())
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            elif style == "model":
                losses.append(engine.step((inputs, targets)).item())
            else:
                losses.append(engine.step(inputs, targets).item())
    return {"losses": losses, "state": engine.full_state_dict(), "lines": lines}


def _router_reference(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = _router(), []
    optimizer = parity.ADAMW(model.parameters())
    for step in range(STEPS):
        inputs, targets = _pairs(step)
        loss = _routed(model(inputs), targets, kind=kind)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.slow_cases("step-mean-fields1", "loop-mean-fields2", "model-sum-fields3")
@pytest.mark.parametrize(
    ("style", "kind", "fields"),
    [
        ("step", "sum", dict(zero=1, micro_batches=2)),
        ("step", "mean", dict(zero=0, micro_batches=4)),
        ("loop", "mean", dict(zero=3)),
        ("model", "sum", dict(zero=2, micro_batches=2)),
    ],
)
def test_a_function_in_the_loss(ranks, style, kind, fields):
    losses, state = _router_reference(kind)
    for found in ranks(2, _train_router, fields, kind, style):
        assert found["losses"] == pytest.approx(losses, rel=1e-6)
        assert not [line for line in found["lines"] if "couples" in line or "over_whole_batch" in line]
        if found["state"]:
            parity.assert_same_state(found["state"], state, 1e-5)


def test_one_that_is_not_wrapped_is_said(ranks):
    found = ranks(2, _train_router, dict(zero=1), "mean", "step", False)[0]
    [line] = [line for line in found["lines"] if "over_whole_batch" in line]
    assert "multiplies by numbers that differ between data ranks or micro-batches" in line
    losses, _ = _router_reference("mean")
    assert abs(found["losses"][-1] / losses[-1] - 1) > 1e-5


def _root_of_squares(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean().sqrt()


def _lines_of_root() -> list[str]:
    engine = ts.parallelize(_router(), ts.Plan(), optimizer=parity.ADAMW, loss_fn=_root_of_squares)
    with logged() as lines:
        for step in range(2):
            engine.step(*parity.shard(engine, *_pairs(step)))
    return lines


def test_a_nonlinear_function_of_a_mean_is_said(ranks):
    lines = ranks(2, _lines_of_root)[0]
    assert sum("couples samples" in line and "engine.over_whole_batch(function)" in line for line in lines) == 1


def _refused(what: str) -> str:
    fields = dict(loop=dict(micro_batches=2), shape={}, vector={})[what]
    engine = ts.parallelize(_router(), ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=_root_of_squares)
    vector = engine.over_whole_batch(lambda logits: logits.mean(0)) if what == "vector" else None
    function = vector or engine.over_whole_batch(balance)
    output = engine.model(torch.ones(2, 2 + (engine.mesh.rank if what == "shape" else 0), 4))
    try:
        function(output)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("loop", "balance is computed over the whole batch, which does not go with micro_batches=2 in a loop of"),
        ("shape", r"tensors of shapes \[2, 2, 3\], \[2, 3, 3\], which differ beyond the first dimension"),
        ("vector", r"returned a tensor of shape \[2, 3\], and what is computed over the whole batch must be a scalar"),
    ],
)
def test_what_is_refused(ranks, what, message):
    import re

    for found in ranks(2, _refused, what):
        assert re.search(message, found)


class Nine(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = torch.randn(2, 5, 4, generator=seeds.generator(index)).unbind()
        return inputs, targets[..., :3]


def _train_last_batch(micro_batches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    wrapped: list[Any] = [balance]
    engine = ts.parallelize(
        _router(),
        ts.Plan(micro_batches=micro_batches),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=lambda output, targets: _routed(output, targets, wrapped[0]),
    )
    wrapped[0] = engine.over_whole_batch(balance)
    losses = [engine.step(*batch).item() for batch in engine.loader(Nine(), batch_size=8, shuffle=False)]
    return losses, engine.full_state_dict()


@pytest.mark.slow
def test_a_sample_that_stands_in_is_in_no_function_of_the_batch(ranks):
    """The last batch has one sample, and the second rank none."""
    [(losses, state)] = ranks(1, _train_last_batch, 1)
    for found, _ in ranks(2, _train_last_batch, 1):
        assert found == pytest.approx(losses, rel=1e-6)
    parity.assert_same_state(ranks(2, _train_last_batch, 1)[0][1], state, 1e-5)
