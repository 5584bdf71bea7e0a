"""A table that was found for another number of tensor-parallel ranks is tried, and may be wrong."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from tensorshard.plan.plan import Plan
from tensorshard.predict.search.problem import SearchProblem, make_problem
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.table.table import TensorTable, VerifiedTable


def _problem() -> SearchProblem:
    return make_problem(
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
    problem, tables = _problem(), []

    def estimated(_: SearchProblem, plan: Plan, world_size: Any, samples: Any, decisions: Any, *__: Any) -> str:
        tables.append(decisions.table)
        if decisions.table == "of two ranks":
            raise RuntimeError("shape '[4, 64, -1, 64]' is invalid for input of size 8192")
        decisions.table = SimpleNamespace(words="its own")
        return "found"

    with (
        mock.patch.object(SearchProblem, "_estimate", estimated),
        mock.patch.object(SearchProblem, "table_for", lambda *_, **__: "of two ranks"),
    ):
        assert problem.estimate(Plan(tp=4).resolve(4), borrow=True) == "found"
    assert tables == ["of two ranks", None]
    assert problem.tables[4, False].words == "its own"


def _table(size: int, *split: str) -> VerifiedTable:
    sequence = {name: SequenceSplit(3, 1, 0, (0,), {}, {}, {}, (), ()) for name in split}
    return VerifiedTable(TensorTable({}), {}, 0.5, size, [], sequence=sequence)


def test_a_table_of_split_sequences_serves_without_them() -> None:
    problem, split, whole = _problem(), _table(2, "block"), _table(4)
    problem.tables.update({(1, False): None, (2, True): split, (4, False): whole})
    assert problem.table_for(2, sequence_parallel=True) == split
    assert problem.table_for(2, sequence_parallel=False) == _table(2)
    assert problem.table_for(4, sequence_parallel=False) == whole
    assert problem.table_for(4, sequence_parallel=True) == _table(4, "block")  # that of two ranks
    assert problem.table_for(8, sequence_parallel=False) == _table(8)
    assert _problem().table_for(2, sequence_parallel=False) is None


def test_an_estimate_takes_the_table_of_split_sequences() -> None:
    problem, tables = _problem(), []
    problem.tables[2, True] = _table(2, "block")

    def estimated(_: SearchProblem, plan: Plan, world_size: Any, samples: Any, decisions: Any, *__: Any) -> str:
        tables.append(decisions.table)
        return "found"

    with mock.patch.object(SearchProblem, "_estimate", estimated):
        assert problem.estimate(Plan(tp=2).resolve(4)) == "found"
    assert tables == [_table(2)] and problem.tables[2, False] == _table(2)
