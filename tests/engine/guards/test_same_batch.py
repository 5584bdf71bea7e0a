"""Ranks that differ only along tp or pp are told if they are given different batches."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parity
import tensorshard as ts
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
