"""The benchmarks of estimates: cells, formulas of others, tables. Nothing large is run."""

from pathlib import Path

import pytest
import torch
from benchmarks.harness import estimates_document
from benchmarks.harness.estimates import Outcome, all_cells, summary_of
from benchmarks.harness.estimates_document import EstimateResults, markdown, write_estimates
from benchmarks.harness.estimates_peers import accelerate_says, deepspeed_says
from benchmarks.harness.headlines import HEADLINES, Finding, largest_that_fits
from benchmarks.harness.headlines_document import PAGE as HEADLINES_PAGE
from benchmarks.harness.headlines_document import HeadlineResults
from benchmarks.harness.headlines_document import markdown as headlines_markdown
from benchmarks.harness.page_blocks import MarkerError, replace_block
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
    table = markdown(EstimateResults("2026-01-02", {"torch": "2.13.0"}, OUTCOMES, OUTCOMES[1:2]))
    assert "| tensorshard, live tensors | 2 | 5.0% | 10.0% | 10.0% |" in table
    assert "| tensorshard, resident memory | 1 | 0.0% | 0.0% | 0.0% |" in table
    assert "| DeepSpeed, live tensors | 1 | 50.0%" in table and "- not compared: c: real run: it raised" in table
    assert table in replace_block(Path(estimates_document.PAGE).read_text(), "estimates", table)


def test_a_block_is_what_stands_between_its_marks():
    text = "before\n<!-- one -->\nold\n<!-- /one -->\nbetween\n<!-- two -->\n<!-- /two -->\nafter"
    once = replace_block(text, "one", r"new \1")
    assert once == text.replace("old", r"new \1") and replace_block(once, "one", r"new \1") == once
    assert replace_block(text, "two", "new") == text.replace("<!-- two -->", "<!-- two -->\nnew")
    with pytest.raises(MarkerError, match="needs the lines '<!-- three -->' and '<!-- /three -->'"):
        replace_block(text, "three", "new")
    with pytest.raises(MarkerError, match="in this order"):
        replace_block("<!-- /one -->\n<!-- one -->", "one", "new")


def test_parts_that_were_not_run_stay(tmp_path, monkeypatch):
    page = tmp_path / "estimate.md"
    page.write_text("<!-- estimates -->\n<!-- /estimates -->\n")
    monkeypatch.setattr(estimates_document, "PAGE", page)
    monkeypatch.setattr(estimates_document, "RESULTS", tmp_path)
    write_estimates(Console(), OUTCOMES, [])
    write_estimates(Console(), [], OUTCOMES[:1])
    (path,) = (tmp_path / "estimate").iterdir()
    found = EstimateResults.load(path)
    assert found.outcomes == OUTCOMES and found.resident == OUTCOMES[:1] and "| 10.0% |" in page.read_text()


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


@pytest.mark.slow
@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_run_has_the_states_of_the_formula(ranks, level):
    assert abs(ranks(1, _states, level)[0]) <= 0.01


def test_one_device_gathers_nothing():
    assert StatesCell("7.5B", 1, 3, 100, 0).formula == StatesCell("7.5B", 1, 1, 100, 0).formula == 18 * 100
    assert StatesCell("7.5B", 4, 3, 100, 0).formula == 4 * 100


@pytest.mark.parametrize(("memory", "largest"), [(1_000, 90), (190, 9), (105, 0), (100_000, 480)])
def test_the_largest_that_fits(memory, largest):
    """100 bytes and 10 for each layer, and a few more for every other layer."""
    asked = []

    def needed(size):
        asked.append(size)
        return 100 + 10 * size - 3 * (size % 2)

    assert abs(largest_that_fits(needed, 30, memory) - largest) <= 1
    assert len(asked) <= 20


def test_headlines_on_the_page():
    assert len({headline.name for headline in HEADLINES}) == len(HEADLINES)
    finding = Finding("big", "Them", "4 x h100", "zero=3", 8, "layers", 10**9, 2**30, 2**31, 16, 2 * 10**9, 2**31)
    cell = StatesCell("7.5B", 64, 1, 100, 225)
    text = headlines_markdown(HeadlineResults([cell], {1: 8_667_000_000, 2: 4_333_500_000}, [finding]))
    assert "| 1.0 GiB | yes | 16 layers: 2B parameters |" in text
    assert "| 2 | 5,615 MB | 0.65 | 4,334 MB | 0.50 |" in text
    assert "at most 0.00% off" in text
    assert text in replace_block(HEADLINES_PAGE.read_text(), "headlines", text)
