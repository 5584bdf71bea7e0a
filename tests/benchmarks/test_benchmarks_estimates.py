"""The benchmarks of estimates: cells, formulas of others, tables. Nothing large is run."""

from pathlib import Path

import pytest
import torch
from benchmarks.harness import estimates_document
from benchmarks.harness.estimates import Outcome, all_cells, summary_of
from benchmarks.harness.estimates_document import EstimateResults, markdown, replace_block, write_estimates
from benchmarks.harness.estimates_peers import accelerate_says, deepspeed_says
from benchmarks.harness.estimates_time import Timed
from benchmarks.harness.zero_table import SIZES, StatesCell, states_cell
from rich.console import Console

OUTCOMES = [
    Outcome("a", {0: 102, 1: 90}, {0: 100, 1: 100}, {"DeepSpeed": 50}),
    Outcome("b", {0: 100}, {0: 100}),
    Outcome("c", failure="real run: it raised"),
]


def test_there_are_enough_cells():
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells) >= 50
    assert {cell.world_size for cell in cells} == {1, 2, 4}


def test_the_rank_that_is_furthest_off_counts():
    assert [outcome.error for outcome in OUTCOMES[:2]] == pytest.approx([-0.1, 0.0])
    assert summary_of([-0.1, 0.02, 0.0]) == pytest.approx({"median": 0.02, "worst": 0.1, "under": 0.1})


def test_the_page_gets_its_table():
    timed = [Timed("one", 1.0, 2.0), Timed("two", 3.0, 3.0), Timed("three", 2.0, 4.0)]
    table = markdown(EstimateResults("2026-01-02", {"torch": "2.13.0"}, OUTCOMES, OUTCOMES[1:2], timed))
    assert "rank correlation 0.50; predicted over measured 0.50 to 1.00, median 0.50" in table
    assert "| tensorshard, live tensors | 2 | 5.0% | 10.0% | 10.0% |" in table
    assert "| tensorshard, resident memory | 1 | 0.0% | 0.0% | 0.0% |" in table
    assert "| DeepSpeed, live tensors | 1 | 50.0%" in table and "- not compared: c: real run: it raised" in table
    text = replace_block("before\n<!-- estimates -->\nold\n<!-- /estimates -->\nafter", table)
    assert table in text and "old" not in text and text.startswith("before") and text.endswith("after")
    with pytest.raises(ValueError, match="needs the lines"):
        replace_block("nothing", table)
    replace_block(Path(estimates_document.PAGE).read_text(), table)


def test_parts_that_were_not_run_stay(tmp_path, monkeypatch):
    page = tmp_path / "estimate.md"
    page.write_text("<!-- estimates -->\n<!-- /estimates -->\n")
    monkeypatch.setattr(estimates_document, "PAGE", page)
    monkeypatch.setattr(estimates_document, "RESULTS", tmp_path)
    timed = [Timed("one", 1.0, 2.0), Timed("two", 3.0, 3.0)]
    write_estimates(Console(), OUTCOMES, [], [])
    write_estimates(Console(), [], [], timed)
    (path,) = (tmp_path / "estimate").iterdir()
    found = EstimateResults.load(path)
    assert found.outcomes == OUTCOMES and found.timed == timed and "| 10.0% |" in page.read_text()


def test_formulas_of_others():
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 5, bias=False))
    assert accelerate_says(model) == 4 * 4 * 150
    assert [deepspeed_says(model, level, 2) for level in (1, 2, 3)] == [None, 600 + 1200, 400 + 1350]


@pytest.mark.parametrize(("level", "paper"), [(1, 31.4), (2, 16.6), (3, 1.88)])
def test_the_formula_is_the_papers(level, paper):
    cell = StatesCell("7.5B", 64, level, round(SIZES["7.5B"]), 0)
    assert cell.paper / 1e9 == pytest.approx(paper, rel=0.005)


def _states(level: int) -> float:
    torch.distributed.destroy_process_group()
    return states_cell("7.5B", 64, level).error


@pytest.mark.parametrize("level", [1, 3])
def test_a_run_has_the_states_of_the_formula(ranks, level):
    assert abs(ranks(1, _states, level)[0]) <= 0.01
