"""A table that was found for another number of tensor-parallel ranks is tried, and may be wrong."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from tensorshard.plan import Plan
from tensorshard.planner.question import Question, ask


def _question() -> Question:
    return ask(
        partial(nn.Linear, 4, 4),
        world_size=4,
        inputs=torch.zeros(4, 4),
        targets=torch.zeros(4, 4),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=nn.functional.mse_loss,
        hardware="h100",
        memory=None,
        global_batch=16,
        fixed=None,
    )


def test_a_table_that_does_not_suit_is_not_used() -> None:
    question, tables = _question(), []

    def estimated(_: Question, plan: Plan, world_size: Any, samples: Any, decisions: Any, *__: Any) -> str:
        tables.append(decisions.table)
        if decisions.table == "of two ranks":
            raise RuntimeError("shape '[4, 64, -1, 64]' is invalid for input of size 8192")
        decisions.table = SimpleNamespace(words="its own")
        return "found"

    with (
        mock.patch.object(Question, "_estimate", estimated),
        mock.patch.object(Question, "table_for", lambda *_, **__: "of two ranks"),
    ):
        assert question.estimate(Plan(tp=4).resolve(4), borrow=True) == "found"
    assert tables == ["of two ranks", None]
    assert question.tables[4, False].words == "its own"
