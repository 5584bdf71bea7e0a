"""Ranks that differ only along tp or pp are told if they are given different batches."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parity
import tensorshard as ts
from log_lines import logged
from tensorshard.models import GPT, next_token_loss

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def _calls(fields: dict[str, Any], odd: int) -> list[str]:
    """What each call says of a good batch, of one that the rank `odd` alone has, and of shapes that change."""
    torch.manual_seed(1)
    engine = ts.parallelize(lambda: GPT(61, 16, 2, 2, 30), ts.Plan(**fields), optimizer=ADAMW, loss_fn=next_token_loss)
    messages = []

    def attempt(call: str, *batch: Any) -> None:
        try:
            getattr(engine, call)(*batch)
            messages.append("taken")
        except ValueError as error:
            messages.append(str(error))

    mine = dist.get_rank() == odd
    inputs, targets = parity.batch("gpt", 0, 4)
    others = parity.batch("gpt", 1, 4)
    attempt("step", *(others if mine else (inputs, targets)))  # the first batches differ in their values
    attempt("step", inputs, targets)
    attempt("evaluate", *(others if mine else (inputs, targets)))
    attempt("predict", others[0] if mine else inputs)
    attempt("step", *((inputs[:2], targets[:2]) if mine else (inputs, targets)))  # shapes, known or new
    attempt("step", *((inputs[:, :-1], targets[:, :-1]) if mine else (inputs[:, :-2], targets[:, :-2])))
    attempt("step", inputs[:, :-2], others[1][:, :-2] if mine else targets[:, :-2])  # targets, at new shapes
    attempt("step", inputs[:, :-2], targets[:, :-2])
    return messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fields", "axes"),
    [
        (2, dict(tp=2), "tp"),
        (2, dict(pp=2, micro_batches=2), "pp"),
        pytest.param(4, dict(tp=2, pp=2, micro_batches=2), "pp and tp", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_rank_of_them_is_told(ranks, size, fields, axes):
    for messages in ranks(size, _calls, fields, size - 1):
        assert [message == "taken" for message in messages] == [False, True, *[False] * 5, True], messages
        for message in messages:
            if message != "taken":
                assert "was given different batches on ranks 0 and" in message
                assert f"which differ only along {axes}: such ranks pass the same batch" in message


def _same_everywhere(fields: dict[str, Any], own: bool, by_hand: bool) -> list[str]:
    """What two steps log, on the same batch on all ranks or on each data rank's own."""
    engine = ts.parallelize(
        nn.Linear(4, 3), ts.Plan(**fields), optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=nn.functional.mse_loss
    )
    inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(engine.mesh.dp_rank if own else 0))

    with logged() as lines:
        for _ in range(2):
            if by_hand:
                engine.backward(engine.model(inputs).square().mean())
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            else:
                engine.step(inputs, torch.zeros(2, 3))
    return [line for line in lines if "same samples" in line]


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_same_loader_on_all_data_ranks_is_said_once(ranks, by_hand):
    first, second = ranks(2, _same_everywhere, {"zero": 1}, False, by_hand)
    assert len(first) == 1 and "data ranks 0 and 1" in first[0] and "DistributedSampler" in first[0] and not second


@pytest.mark.parametrize("fields, own", [({"zero": 1}, True), ({"tp": 2}, False)])
def test_ranks_that_should_have_their_batches_are_silent(ranks, fields, own):
    assert ranks(2, _same_everywhere, fields, own, False) == [[], []]
