"""Heads built with update= under plans: what they do by themselves without a plan, as a parameter group of SGD."""

import unittest.mock
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import parity
import tensorshard as ts
from head_models import SGD, UPDATE, HeadClassifier, classifier_batch, parallelized
from log_lines import logged
from tensorshard.model.trains_itself import take_own_rules
from tensorshard.nn import ParallelLinearCrossEntropy

STEPS = 6

# id: (model, ranks, fields of the plan)
PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt-1-micro4": ("gpt", 1, dict(micro_batches=4)),
    "gpt-2-zero0": ("gpt", 2, dict(zero=0)),
    "gpt-2-zero2-micro2": ("gpt", 2, dict(zero=2, micro_batches=2)),
    "gpt-2-zero3": ("gpt", 2, dict(zero=3)),
    "gpt-4-tp2-zero1": ("gpt", 4, dict(tp=2, zero=1)),
    "gpt-4-tp2-zero3-micro2": ("gpt", 4, dict(tp=2, zero=3, micro_batches=2)),
    "gpt-2-pp2": ("gpt", 2, dict(pp=2, micro_batches=2)),
    "gpt-4-pp2-tp2": ("gpt", 4, dict(pp=2, tp=2, micro_batches=2)),
    "gpt-4-pp2-zero3": ("gpt", 4, dict(pp=2, zero=3, micro_batches=2)),
    "resnet-2-tp2": ("resnet_37", 2, dict(tp=2)),
}


def build(kind: str, **update: Any) -> nn.Module:
    """A model with a head in its last place that updates itself."""
    model = parity.build(f"{kind}_head")
    for owner in list(model.modules()):
        for name, head in list(owner.named_children()):
            if isinstance(head, ParallelLinearCrossEntropy):
                plain = nn.Linear(head.in_features, head.num_classes, head.bias is not None)
                plain.load_state_dict(head.state_dict())
                options = dict(reduction=head.reduction, update=UPDATE | update)
                setattr(owner, name, ParallelLinearCrossEntropy.from_linear(plain, **options))
    return model


def _build_unseeded(kind: str, **update: Any) -> nn.Module:
    """A constructor that seeds torch cannot be recorded."""
    with unittest.mock.patch("torch.manual_seed"):
        return build(kind, **update)


def engine_of(kind: str, fields: dict[str, Any], as_callable: bool = False, **update: Any) -> ts.Engine:
    model = partial(_build_unseeded, kind, **update) if as_callable else build(kind, **update)
    return ts.parallelize(model, ts.Plan(**fields), optimizer=SGD, loss_fn=parity.loss_function(f"{kind}_head"))


def _steps(engine: ts.Engine, kind: str, steps: range) -> list[float]:
    return [engine.step(*parity.shard(engine, *parity.batch(f"{kind}_head", step))).item() for step in steps]


@cache
def _alone(kind: str, halve: bool = False, initial: "_State | None" = None) -> dict[str, Any]:
    """The fused update and an optimizer for the rest, without a plan."""
    model = build(kind)
    if initial is not None:
        model.load_state_dict(initial.tensors)
    head = next(module for module in model.modules() if isinstance(module, ParallelLinearCrossEntropy))
    assert head.optimizer is not None
    own = set(head.parameters())
    optimizers = [SGD([p for p in model.parameters() if p not in own]), head.optimizer]
    schedulers = [StepLR(optimizer, 2, 0.5) for optimizer in optimizers if halve]
    losses = []
    for step in range(STEPS):
        inputs, targets = parity.batch(f"{kind}_head", step)
        output = parity.loss_function(f"{kind}_head")(model(*inputs), targets)
        loss = output[0] / output[1] if isinstance(output, tuple) else output
        loss.backward()
        for each in (*optimizers, *schedulers):
            each.step()
        optimizers[0].zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": model.state_dict()}


class _State:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors


def _train(kind: str, fields: dict[str, Any], as_callable: bool = False, halve: bool = False) -> dict[str, Any]:
    with logged() as messages:
        engine = engine_of(kind, fields, as_callable)
    initial = engine.full_state_dict() if as_callable else {}
    scheduler = StepLR(engine.optimizer, 2, 0.5) if halve else None
    losses = []
    for step in range(STEPS):
        losses += _steps(engine, kind, range(step, step + 1))
        if scheduler is not None:
            scheduler.step()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    state = engine.full_state_dict()
    return {"losses": losses, "state": state, "groups": groups, "initial": initial, "messages": messages}


@pytest.mark.slow_cases("gpt-4-tp2-zero1", "gpt-4-tp2-zero3-micro2", "gpt-4-pp2-tp2", "gpt-4-pp2-zero3", "resnet-2-tp2")
@pytest.mark.parametrize("case", PLANS)
def test_it_is_what_the_head_does_by_itself(ranks, case):
    kind, world_size, fields = PLANS[case]
    found = ranks(world_size, _train, kind, fields)
    parity.assert_same(found[0], _alone(kind), 1e-5)
    for other in found:
        assert other["losses"] == found[0]["losses"]
        assert other["groups"] == found[0]["groups"]
    rest, head = found[0]["groups"]
    assert (rest["lr"], rest["momentum"], rest["nesterov"]) == (0.05, 0.5, True)
    assert {key: head[key] for key in UPDATE} == UPDATE and not head["nesterov"]
    (told,) = found[0]["messages"]
    assert told.startswith("module 'head' was built with update=" if kind == "gpt" else "module 'classifier.1' was")
    assert told.endswith("of its own: SGD with lr=0.2, momentum=0.9, weight_decay=0.05")
    assert not any(other["messages"] for other in found[1:])


def test_schedulers_see_the_group(ranks):
    found = ranks(2, _train, "gpt", dict(zero=1), False, True)[0]
    parity.assert_same(found, _alone("gpt", halve=True), 1e-5)
    assert [group["lr"] for group in found["groups"]] == pytest.approx([0.05 / 8, 0.2 / 8])


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(dict(tp=2), marks=pytest.mark.slow),
        pytest.param(dict(zero=3), marks=pytest.mark.slow),
        dict(pp=2, micro_batches=2),
    ],
)
def test_a_callable_is_still_recorded(ranks, fields):
    """No process builds the whole model: the head's optimizer does not keep what its constructor made."""
    found = ranks(2, _train, "gpt", fields, True)[0]
    assert len(found["messages"]) == 1 and "update=" in found["messages"][0]
    parity.assert_same(found, _alone("gpt", initial=_State(found["initial"])), 1e-5)


def _of_meta() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = HeadClassifier(update=UPDATE)
    engine = parallelized(model, ts.Plan(tp=2))
    inputs, targets = classifier_batch()
    before = engine.full_state_dict()
    engine.step((inputs, targets), targets)
    return {name: value - before[name] for name, value in engine.full_state_dict().items()}


def test_a_meta_module(ranks):
    assert all(moved.abs().max() > 1e-4 for moved in ranks(2, _of_meta)[0].values())


# -- with what the fused form cannot be combined with --


def _plain_sgd(clip: float) -> dict[str, Any]:
    model = build("gpt")
    take_own_rules(model)
    own = set(model.head.parameters())
    rest = [p for p in model.parameters() if p not in own]
    optimizers = [SGD(rest), torch.optim.SGD(list(own), **UPDATE)]
    losses = []
    for step in range(STEPS):
        inputs, targets = parity.batch("gpt_head", step)
        loss = model(*inputs) / (targets != -100).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": model.state_dict()}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(dict(tp=2, zero=1), marks=pytest.mark.slow),
        dict(pp=2, micro_batches=4),
        pytest.param(dict(zero=3), marks=pytest.mark.slow),
    ],
)
def test_clipping(ranks, fields):
    expected = _plain_sgd(0.5)
    assert abs(expected["losses"][-1] - _alone("gpt")["losses"][-1]) > 1e-3
    found = ranks(4 if "zero" in fields else 2, _train, "gpt", fields | dict(clip_grad_norm=0.5))
    parity.assert_same(found[0], expected, 1e-5)


def _overflowing() -> tuple[list[bool], list[float]]:
    """Whether the head moved in each step of fp16, whose first losses are scaled beyond its range."""
    engine = parallelized(partial(HeadClassifier, update=UPDATE), ts.Plan(precision="fp16"))
    assert engine.scaler is not None
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 2.0**30})
    inputs, targets = classifier_batch()
    moved, losses = [], []
    before = engine.full_state_dict()["head.weight"]
    for _ in range(30):
        losses.append(engine.step((inputs, targets), targets).item())
        after = engine.full_state_dict()["head.weight"]
        moved.append(not torch.equal(before, after))
        before = after
    return moved, losses


def test_fp16_skips_steps_of_the_head_too(ranks):
    moved, losses = ranks(1, _overflowing)[0]
    assert not moved[0] and moved[-1] and losses[-1] < losses[0]


def _named(fields: dict[str, Any]) -> list[list[str]]:
    def factory(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.SGD:
        matrices = [(name, p) for name, p in named_parameters if p.ndim == 2]
        return torch.optim.SGD(
            [
                {"params": matrices, "weight_decay": 0.1},
                {"params": [pair for pair in named_parameters if pair[1].ndim < 2]},
            ],
            lr=0.1,
        )

    engine = parallelized(HeadClassifier(update=UPDATE), ts.Plan(**fields), factory)
    return [group["param_names"] for group in engine.optimizer.param_groups]


def test_a_factory_that_wants_names_gets_those_of_the_rest(ranks):
    expected = [["body.0.weight", "body.2.weight"], ["body.0.bias", "body.2.bias"], ["head.weight", "head.bias"]]
    assert ranks(2, _named, dict(zero=2)) == [expected, expected]


class _OnlyHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = ParallelLinearCrossEntropy(6, 37, update=UPDATE)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.head(x, targets)


def _only_head() -> list[float]:
    engine = parallelized(_OnlyHead(), ts.Plan(zero=3))
    inputs, targets = classifier_batch()
    return [engine.step((inputs, targets), targets).item() for _ in range(3)]


def test_a_model_that_is_a_head(ranks):
    found = ranks(2, _only_head)
    assert found[0] == found[1] and found[0][2] < found[0][0]


# -- checkpoints --


def _save(fields: dict[str, Any], path: str) -> None:
    engine = engine_of("gpt", fields)
    _steps(engine, "gpt", range(3))
    engine.save(path)


def _go_on(fields: dict[str, Any], path: str) -> dict[str, Any]:
    engine = engine_of("gpt", fields, lr=7.0)  # what was saved counts
    engine.load(path)
    _steps(engine, "gpt", range(3, STEPS))
    return {"losses": [], "state": engine.full_state_dict()}


@pytest.mark.parametrize(
    ("ranks_before", "before", "ranks_after", "after"),
    [
        pytest.param(4, dict(tp=2, zero=3), 2, dict(pp=2, micro_batches=2), marks=pytest.mark.slow),
        (2, dict(pp=2, micro_batches=2), 2, dict(zero=1)),
        pytest.param(1, dict(), 4, dict(tp=2, zero=2), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_plan(ranks, tmp_path, ranks_before, before, ranks_after, after):
    path = str(tmp_path / "saved")
    ranks(ranks_before, _save, before, path)
    found = ranks(ranks_after, _go_on, after, path)[0]
    parity.assert_same_state(found["state"], _alone("gpt")["state"], 1e-5)
