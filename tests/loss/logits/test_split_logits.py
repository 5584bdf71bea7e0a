"""Logits that look whole and are split: exact whatever is done with them, and not gathered where a loss takes them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parity
import tensorshard as ts
import tensorshard.distributed as tsd
from own_operations import SumOfSquares
from tensorshard.comm.marks import set_mark
from tensorshard.loss.logits.linear_logits import Shard, split_logits
from tensorshard.nn.functional import parallel_cross_entropy

CLASSES = 11
TARGETS = torch.randint(0, CLASSES, (3, 5), generator=torch.Generator().manual_seed(0))
TARGETS[0, 1] = -100


def _shifted(x: torch.Tensor) -> torch.Tensor:
    shifted = x.float().double()[..., :-1, :].contiguous().view(-1, CLASSES)
    return F.cross_entropy(shifted, TARGETS[:, 1:].reshape(-1))


def _capped(x: torch.Tensor) -> torch.Tensor:
    capped = torch.tanh(x / 3.0) * 3.0
    return F.cross_entropy(capped.flatten(0, 1), TARGETS.flatten(), reduction="none").sum()


def _some_positions(x: torch.Tensor) -> torch.Tensor:
    positions = torch.tensor([0, 3])
    return F.cross_entropy(x[:, positions].flatten(0, 1), TARGETS[:, positions].flatten())


def _weighted(x: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 2, CLASSES, dtype=x.dtype)
    return F.cross_entropy(x.reshape(15, -1), TARGETS.view(-1).clamp(min=0), weight, ignore_index=3)


def _written(x: torch.Tensor) -> torch.Tensor:
    x[..., 3] = -5.0
    return F.cross_entropy(x.view(-1, CLASSES), TARGETS.view(-1))


def _halved_in_place(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.div_(2.0).view(-1, CLASSES), TARGETS.view(-1))


def _written_and_squared(x: torch.Tensor) -> torch.Tensor:
    x.mul_(0.5)
    x[..., 1] *= 3.0
    return SumOfSquares.apply(x) + x.tanh().sum()


def _after_a_metric(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        assert x.argmax(-1).shape == TARGETS.shape
    return F.cross_entropy(x.view(-1, CLASSES), TARGETS.view(-1))


def _probabilities(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.view(-1, CLASSES), x.detach().view(-1, CLASSES).softmax(-1))


def _to_bf16_and_back(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.to(torch.bfloat16).double().view(-1, CLASSES), TARGETS.view(-1))


LOSSES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {  # and whether the whole is needed
    "shifted, as causal models do": (_shifted, False),
    "classes second": (lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS, label_smoothing=0.1), False),
    "permuted": (lambda x: F.cross_entropy(x.permute(0, 2, 1), TARGETS, reduction="sum"), False),
    "rows by a mask": (lambda x: F.cross_entropy(x[TARGETS != -100], TARGETS[TARGETS != -100]), False),
    "the last position": (lambda x: nn.CrossEntropyLoss()(x[:, -1], TARGETS[:, -1]), False),
    "positions by index": (_some_positions, False),
    "soft cap": (_capped, False),
    "class weights": (_weighted, False),
    "our own loss": (lambda x: parallel_cross_entropy(x.view(-1, CLASSES), TARGETS.view(-1), z_loss=0.0), False),
    "by way of bf16": (_to_bf16_and_back, False),
    "log-softmax": (lambda x: F.nll_loss(F.log_softmax(x.view(-1, CLASSES), -1), TARGETS.view(-1)), True),
    "fewer classes": (lambda x: F.cross_entropy(x[..., :7].flatten(0, 1), TARGETS.flatten() % 7), True),
    "class probabilities": (_probabilities, True),
    "written to": (_written, True),
    "halved in place": (_halved_in_place, True),
    "in place, then a function of its own": (_written_and_squared, True),
    "looked at before": (_after_a_metric, True),
    "a function of its own": (SumOfSquares.apply, True),
    "arithmetic with others": (lambda x: (x + torch.ones(CLASSES, dtype=x.dtype)).logsumexp(-1).mean(), True),
    "sum over classes": (lambda x: x.softmax(-1)[..., :4].sum(), True),
}  # fmt: skip


@contextmanager
def _counted_gathers() -> Iterator[list[Any]]:
    seen: list[Any] = []
    original = Shard.full
    Shard.full = lambda self, dtype: seen.append(self.shape) or original(self, dtype)  # type: ignore[func-returns-value]
    try:
        yield seen
    finally:
        Shard.full = original


def _compare() -> None:
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(3, 5, CLASSES, generator=generator, dtype=torch.float64, requires_grad=True)
    for name, (loss_fn, needs_whole) in LOSSES.items():
        expected = loss_fn(whole * 1.0)
        (expected_grad,) = torch.autograd.grad(expected, whole)
        part = set_mark(tsd.scatter(whole * 1.0, -1, group), None) * 1.0
        logits = split_logits(part, -1, CLASSES, group)
        assert logits.shape == whole.shape and logits.requires_grad and logits.dtype == whole.dtype
        with _counted_gathers() as gathers:
            loss = loss_fn(logits)
        (grad,) = torch.autograd.grad(loss, whole)
        torch.testing.assert_close(
            loss.double(), expected.double(), rtol=1e-6, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
        torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
        assert bool(gathers) == needs_whole, name


@pytest.mark.parametrize("world", [2, 3])
def test_every_use_gives_the_loss_and_gradient_of_whole_logits(ranks, world):
    ranks(world, _compare)


def _gather_backwards() -> None:
    part = torch.ones(2, 3, requires_grad=True)
    logits = split_logits(part, -1, 6, dist.group.WORLD)
    seen = []
    logits.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    F.cross_entropy(logits, torch.tensor([1, 4])).backward()
    assert seen == [(2, 3)]
    assert type(logits + logits) is torch.Tensor and "tensor(" in repr(logits)
    logits = split_logits(part, -1, 6, dist.group.WORLD)
    view = logits.view(2, 1, 6)
    with torch.no_grad():
        logits[0] = 0
    assert view.sum() == 6 and SumOfSquares.apply(view) == 6


def test_hooks_see_the_part_and_views_what_is_written(ranks):
    ranks(2, _gather_backwards)


def _step_with_inplace_activation() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 6)).double()
    inputs, targets = torch.randn(4, 8, dtype=torch.float64), torch.arange(4)
    alone = deepcopy(model)
    F.cross_entropy(alone(inputs), targets).backward()
    plan = ts.Plan(tp=2, tp_plan={"0": "colwise_gather", "2": "colwise_gather"})
    sgd = partial(torch.optim.SGD, lr=1.0)
    engine = ts.parallelize(model, plan, optimizer=sgd, loss_fn=F.cross_entropy)
    engine.step(inputs, targets)
    moved = engine.full_state_dict()
    return {name: p.detach() - p.grad - moved[name] for name, p in alone.named_parameters()} if moved else {}


def test_what_writes_into_a_hidden_layers_output_has_its_gradient(ranks):
    differences = ranks(2, _step_with_inplace_activation)[0]
    assert len(differences) == 4
    for name, difference in differences.items():
        assert difference.abs().max() < 1e-12, name


class _WithLoss(nn.Module):
    """A model that takes labels, as those of transformers do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = parity.build(kind)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, labels=labels).loss


def _train(fields: dict[str, Any]) -> tuple[list[float], int]:
    with _counted_gathers() as gathers:
        engine = ts.parallelize(
            partial(_WithLoss, "llama"), ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=lambda loss, _: loss
        )
        losses = []
        for step in range(4):
            inputs, targets = parity.batch("llama", step)
            losses.append(engine.step({**inputs, "labels": targets}, targets).item())
        losses.append(engine.evaluate({**inputs, "labels": targets}, targets).item())
    if fields["zero"] < 3:
        output = engine.model.inner(input_ids=inputs["input_ids"])
        assert type(output.logits) is torch.Tensor  # one rank alone may print it
    return losses, len(gathers)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"zero": 1, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"zero": 3, "sequence_parallel": True}, marks=pytest.mark.slow),
        {"zero": 0, "precision": "bf16"},
    ],
    ids=["recompute", "sequence parallel", "bf16"],
)
def test_a_loss_inside_the_model_takes_split_logits(ranks, fields):
    [(expected, _)] = ranks(1, _train, {"zero": fields["zero"], "precision": fields.get("precision", "fp32")})
    for losses, gathers in ranks(2, _train, {"tp": 2, **fields}):
        assert losses == pytest.approx(expected, rel=5e-3 if "precision" in fields else 1e-5)
        assert gathers == 0
