"""Outputs of any class train all stages, or are refused."""

from collections import UserDict, UserList
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tensorshard as ts


@dataclass
class Record:
    logits: torch.Tensor
    hidden: Any = None


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: Any


class Plain:
    """An object of one's own, with an attribute."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.inner = SimpleNamespace(logits=[logits])

    @property
    def logits(self) -> torch.Tensor:
        return self.inner.logits[0]


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Late:
    """The tensor is in a function's closure."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.compute = lambda: logits

    @property
    def logits(self) -> torch.Tensor:
        return self.compute()


class Hidden:
    """Whose tensor nothing shows: a generator has it."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.once: Iterator[torch.Tensor] = (each for each in [logits])

    @property
    def logits(self) -> torch.Tensor:
        return next(self.once)


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "namespace": (lambda t: SimpleNamespace(logits=t), lambda o: o.logits),
    "userdict": (lambda t: UserDict(logits=t), lambda o: o["logits"]),
    "userlist": (lambda t: UserList([t]), lambda o: o[0]),
    "nested": (lambda t: {"out": SimpleNamespace(inner=UserDict(t=(t,)))}, lambda o: o["out"].inner["t"][0]),
    "dataclass": (Record, lambda o: o.logits),
    "namedtuple": (lambda t: Pair(t, None), lambda o: o.logits),
    "plain": (Plain, lambda o: o.logits),
    "slots": (Slotted, lambda o: o.logits),
    "closure": (Late, lambda o: o.logits),
    "hidden": (Hidden, lambda o: o.logits),
}


class Net(nn.Module):
    """Its output is of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return KINDS[self.kind][0](x)


def _loss(kind: str, output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(KINDS[kind][1](output), targets)


def _run(kind: str, fields: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    engine = ts.parallelize(
        Net(kind),
        ts.Plan(**fields),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        loss_fn=partial(_loss, kind),
        sample_inputs=torch.ones(4, 6),
    )
    generator = torch.Generator().manual_seed(0)
    losses = []
    try:
        for _ in range(3):
            batch = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
            losses.append(engine.step(*batch).item())
    except (ValueError, RuntimeError) as error:
        return str(error)
    predicted: Any = None
    try:
        predicted = KINDS[kind][1](engine.predict(torch.ones(4, 6))).sum().item()
    except (ValueError, TypeError) as error:
        predicted = str(error)
    return losses, engine.full_state_dict(), predicted


@pytest.mark.fast_cases("namespace")
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_any_class_train_all_stages(ranks, kind):
    results = ranks(2, _run, kind, dict(pp=2, micro_batches=2))
    if kind == "hidden":
        for message in results:
            assert "no tensor was seen in the model's output (Hidden)" in message and "pp=2" in message
        return
    losses, weights, predicted = ranks(1, _run, kind, dict(micro_batches=2))[0]
    for result in results:
        assert result[0] == pytest.approx(losses, rel=2e-5)
        if kind in ("plain", "slots", "closure"):
            assert type(KINDS[kind][0](torch.ones(1))).__name__ in result[2]
        else:
            assert result[2] == pytest.approx(predicted, rel=2e-5)
    for name, value in weights.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=2e-5, atol=2e-5)


class _Aside(nn.Module):
    """Its first layer has an output of its own, which crosses every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        aside = self.aside(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return {"logits": x, "aside": aside}


def _loss_of(weights: list[float]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The n-th step takes the output beside with the n-th weight; at 0 it leaves it out."""
    left = iter([weight for weight in weights for _ in range(2)])  # a call for each micro-batch

    def loss_fn(output: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(output["logits"], targets)
        weight = next(left)
        return loss + weight * output["aside"].square().mean() if weight else loss

    return loss_fn


def _steps_aside(fields: dict[str, Any], weights: list[float]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    plan = ts.Plan(micro_batches=2, **fields)
    engine = ts.parallelize(_Aside(), plan, optimizer=adamw, loss_fn=_loss_of(weights), sample_inputs=x[:2])
    for _ in weights:
        engine.step(x, y)
        engine.predict(x)
    return engine.full_state_dict()


@pytest.mark.fast_cases("0-1f1b")
@pytest.mark.parametrize(
    "fields",
    [
        dict(pp=2),
        dict(pp=4, zero=1, pp_schedule="gpipe"),
        dict(pp=2, pp_schedule="interleaved_1f1b", pp_stages_per_rank=2),
        dict(pp=2, pp_schedule="zbv", pp_stages_per_rank=2),
    ],
    ids=["1f1b", "four", "interleaved", "zbv"],
)
@pytest.mark.parametrize("weight", [0.0, 0.3], ids=["0", "0.3"])
def test_what_the_loss_leaves_out_is_not_decayed(ranks, fields, weight):
    """It has no gradient, as in one process, and not one of zeros."""
    (alone,) = ranks(1, _steps_aside, {}, [weight] * 3)
    found = ranks(fields["pp"], _steps_aside, fields, [weight] * 3)[0]
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


def _used_later(weights: list[float]) -> str:
    try:
        _steps_aside(dict(pp=2), weights)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_what_the_loss_uses_later_is_refused_by_name(ranks):
    message = ranks(2, _used_later, [0.0, 0.3])[1]
    assert "had none in the first step with such inputs" in message and "times 0" in message
