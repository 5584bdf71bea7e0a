"""What one rank decides for all: its result or its failure, everywhere. The search for a table is such a decision."""

import pickle
from typing import Any

import pytest
import torch.distributed as dist

import parity
from tensorshard.comm.decisions import decide_once
from tensorshard.tensor_parallel.search import find_table as finding
from tensorshard.tensor_parallel.search.check_table import WrongTableError


def _world() -> Any:
    return dist.group.WORLD


def _rank_of_the_decision() -> tuple[int, str]:
    return decide_once(lambda: (dist.get_rank(), "a table"), _world())


def test_the_first_rank_decides(ranks):
    assert ranks(3, _rank_of_the_decision) == [(0, "a table")] * 3


def _decision_of_a_part() -> list[int]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return [decide_once(dist.get_rank, group) for group in groups if dist.get_rank(group) >= 0]


def test_the_first_rank_of_each_group_decides(ranks):
    assert ranks(4, _decision_of_a_part) == [[0], [0], [2], [2]]


class AwkwardError(ValueError):
    """One that pickle cannot bring back."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} is {number}")


def _failure(kind: str) -> tuple[str, str]:
    def decide() -> None:
        if dist.get_rank() > 0:
            raise AssertionError("only the first rank is to decide")
        raise WrongTableError("no good") if kind == "plain" else AwkwardError("size", 3)

    try:
        decide_once(decide, _world())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_failure_is_raised_by_every_rank(ranks):
    assert ranks(2, _failure, "plain") == [("WrongTableError", "no good")] * 2
    assert ranks(2, _failure, "awkward") == [("AwkwardError", "size is 3"), ("RuntimeError", "AwkwardError: size is 3")]


def _searches_of(fields: dict[str, Any]) -> tuple[int, str, str]:
    """How often this rank searched; the table and the refusal that it came to."""
    parity.forget_tables()
    searches: list[int] = []
    search = finding.run_once
    finding.run_once = lambda *args, **kwargs: searches.append(1) or search(*args, **kwargs)
    try:
        engine = parity.make_engine("gpt", fields)
        return len(searches), engine.sharded.split.table.describe(), ""
    except ValueError as error:
        return len(searches), "", f"{type(error).__name__}: {error}"
    finally:
        finding.run_once = search


def test_one_rank_searches_for_a_table(ranks):
    found = ranks(4, _searches_of, dict(tp=2, zero=1))
    assert [refusal for _, _, refusal in found] == [""] * 4
    assert [searches for searches, _, _ in found] == [1, 0, 0, 0]
    assert "rowwise" in found[0][1]
    assert all(table == found[0][1] for _, table, _ in found)


def test_a_refused_table_is_refused_alike_on_every_rank(ranks):
    refusals = ranks(2, _searches_of, dict(tp=2, tp_plan={"blocks.*.mlp.up": "colwise"}))
    assert "WrongTableError: the tensor-parallel table is wrong for blocks.*" in refusals[0][2]
    assert refusals[1][2] == refusals[0][2]


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_found_plan_travels_unchanged(kind):
    found = finding.find_tensor_plan(parity.build(kind), 2)
    assert pickle.loads(pickle.dumps(found)) == found
