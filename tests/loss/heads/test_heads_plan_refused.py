"""Heads built with update= that a plan cannot train as they would have trained themselves, refused by name."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import parity
import tensorshard as ts
from head_models import SGD, UPDATE, HeadClassifier, classifier_batch, parallelized
from log_lines import logged
from tensorshard.nn import ParallelLinearCrossEntropy


def _tied() -> nn.Module:
    model = parity.build("gpt_tied")
    model.head = ParallelLinearCrossEntropy.from_linear(model.head, update=UPDATE)
    model.embedding.weight = model.head.weight
    return model


def _half_done() -> nn.Module:
    model = HeadClassifier(update=UPDATE)
    model.head.optimizer.group["pending"] = True  # what a backward under head.accumulate() leaves
    return model


def _scheduled() -> nn.Module:
    model = HeadClassifier(update=UPDATE)
    StepLR(model.head.optimizer, 2)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "AdamW": (
        partial(HeadClassifier, update=UPDATE),
        parity.ADAMW,
        r"SGD with lr=0.2, .*made an AdamW: use optimizer=",
    ),
    "tied": (
        _tied,
        SGD,
        "'embedding.weight'(, whose part of the gradient| shares the memory of the parameter 'head.weight')",
    ),
    "bf16": (
        lambda: HeadClassifier(update=UPDATE, dtype=torch.bfloat16),
        SGD,
        r"its weight is of bfloat16, which would not stay so narrow: build it with dtype=torch.float32",
    ),
    "momentum": (
        partial(HeadClassifier, update=UPDATE | dict(momentum_dtype="int8")),
        SGD,
        "its momentum of momentum_dtype='int8' would be as wide as the weight: leave momentum_dtype out",
    ),
    "sample": (
        partial(HeadClassifier, update=UPDATE, sample_rate=0.5),
        SGD,
        "with sample_rate=0.5 that would move the classes outside of a step's sample as well, by momentum=0.9",
    ),
    "half done": (_half_done, SGD, "micro-batches are in its momentum whose step was not ended"),
    "scheduled": (_scheduled, SGD, "a learning-rate scheduler was built on head.optimizer, which does nothing then"),
}


def _refusals(fields: dict[str, Any]) -> dict[tuple[str, bool], str]:
    """The errors of this rank. A model that was given built is left as it was."""
    found = {}
    for case, (make, optimizer, _) in REFUSED.items():
        for as_callable in (False, True):
            model = make()
            with pytest.raises(ValueError) as raised:
                parallelized(make if as_callable else model, ts.Plan(**fields), optimizer)
            assert model.head.optimizer is not None and not any(p.is_meta for p in model.parameters())
            found[case, as_callable] = str(raised.value)
    return found


@pytest.mark.parametrize("fields", [dict(tp=2), dict(pp=2, micro_batches=2)])
def test_refused_on_every_rank(ranks, fields):
    for found in ranks(2, _refusals, fields):
        for (case, _), message in found.items():
            assert re.search(REFUSED[case][2], message), message


def _sampled() -> None:
    torch.manual_seed(0)
    model = HeadClassifier(update=dict(lr=0.5), sample_rate=0.5)
    alone = copy.deepcopy(model)
    rest = SGD(alone.body.parameters())
    engine = parallelized(model, ts.Plan())
    inputs, targets = classifier_batch()
    with ts.same_randomness(alone, seed=3):  # which classes are drawn
        for _ in range(3):
            engine.step((inputs, targets), targets)
            alone(inputs, targets).backward()
            rest.step()
            rest.zero_grad()
            alone.head.optimizer.step()
    parity.assert_same_state(engine.full_state_dict(), alone.state_dict(), 1e-5)


def test_a_sample_without_momentum_is_trained_alike(ranks):
    ranks(1, _sampled)


def _stepped() -> list[str]:
    model = HeadClassifier(update=UPDATE)
    model(*classifier_batch()).backward()
    model.head.optimizer.step()
    with logged() as messages:
        parallelized(model, ts.Plan())
    return messages


def test_a_momentum_that_is_left_behind_is_told_of(ranks):
    (message,) = ranks(1, _stepped)[0]
    assert message.endswith(", whose momentum begins anew after the 1 steps of head.optimizer")


def test_group_sharded_refuses_it():
    model = HeadClassifier(update=UPDATE)
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"module 'head' .* built with update=, .*or use tensorshard.parallelize"):
        ts.group_sharded_parallel(model, optimizer, "os_g")
