"""The benchmark of models: what counts as exact, whose fault an exception is, its results files and its page."""

import math
from dataclasses import replace

import pytest
import torch
from benchmarks.harness import models_document, models_results
from benchmarks.harness.models_cells import Cell, CellRunner, installed
from benchmarks.harness.models_judge import (
    bf16_allowance,
    bf16_distance,
    difference,
    failure_of,
    is_exact,
)
from benchmarks.harness.models_training import Trained, batch, build, train_alone
from benchmarks.models.plans import PLANS
from benchmarks.models.registry import FAMILIES, find_cases, is_installed
from benchmarks.suites.models import select_cases

import tensorshard as ts
from tensorshard.comm.sharding import shard_range


def trained(weight: float = 1.0, loss: float = 2.0) -> Trained:
    return Trained([loss, loss], {"weight": torch.full((3,), weight), "calls": torch.tensor(2)})


def test_a_difference_is_that_of_losses_and_of_every_tensor():
    assert difference(trained(), trained()).largest == 0.0
    assert difference(trained(loss=2.2), trained()).losses == pytest.approx(0.1)
    apart = difference(trained(weight=1.5), trained())
    assert (apart.weights, apart.where) == (0.5, "weight")
    other = trained()
    other.state["calls"] = torch.tensor(3)
    assert difference(other, trained()).where == "calls"
    assert difference(trained(weight=math.nan), trained()).largest == math.inf


def test_a_state_dict_of_other_names_or_shapes_differs_infinitely():
    less = trained()
    del less.state["calls"]
    assert difference(less, trained()).describe() == "the state dicts' names differ: calls"
    longer = replace(trained(), state={"weight": torch.ones(4), "calls": torch.tensor(2)})
    assert "[4], not [3]" in difference(longer, trained()).describe()


def test_only_a_difference_that_shrinks_in_fp64_is_rounding():
    rounding, fault = difference(trained(1 + 3e-5), trained()), difference(trained(1 + 1e-2), trained())
    assert is_exact(difference(trained(1 + 1e-6), trained()))
    assert not is_exact(rounding)
    assert is_exact(rounding, difference(trained(), trained()))
    assert not is_exact(fault, fault)
    assert not is_exact(rounding, rounding)


def test_bf16_may_differ_as_other_orders_of_the_samples_do():
    losses, weights = bf16_allowance(trained(), [trained(), trained(weight=1.01, loss=2.1)])
    assert losses == pytest.approx(3 * 0.1 + 2**-8)
    assert weights > 3 * bf16_distance(trained(), trained(weight=1.01))[1]
    assert bf16_distance(trained(), trained(weight=1.01), resting=["weight"])[1] == 0.0


def _failure(call):
    with pytest.raises(Exception) as caught:
        call()
    return failure_of(caught.value, "parallelize", 0.0)


def test_only_what_tensorshard_raises_itself_is_one_of_its_sentences():
    refusal = _failure(lambda: ts.Plan(tp=0))
    assert refusal.is_sentence
    assert refusal.first_sentence.startswith("tp is 0")
    crash = _failure(lambda: shard_range("ten", 2, 0))  # type: ignore[arg-type]
    assert (crash.kind, crash.is_sentence) == ("TypeError", False)
    assert "sharding.py" in crash.where


def test_results_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(models_results, "FOLDER", tmp_path)
    results = models_results.load_family("plain")
    assert not results.cells
    cell = Cell("refused", "a 'b'", "step 1", with_samples=Cell("exact", split_share=0.5, cpu_seconds=1.5))
    results.add("MLP", "tp", "abc", cell)
    results.add("MLP", "pp", "abc", Cell("exact"))
    results.save()
    read = models_results.load_family("plain")
    assert read.cells == {"MLP": {"tp": ("abc", cell), "pp": ("abc", Cell("exact"))}}
    assert read.is_done("MLP", "tp", "abc")
    assert not read.is_done("MLP", "tp", "other sources")
    assert not read.is_done("MLP", "zero3", "abc")


def test_the_page_has_a_row_a_model_and_every_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(models_results, "FOLDER", tmp_path)
    monkeypatch.setattr(models_document, "DOCUMENT", page := tmp_path / "models.md")
    results = models_results.load_family("plain")
    refused = Cell("refused", "no block of 'MLP' can be split", with_samples=Cell("exact", split_share=0.97))
    results.add("MLP", "tp", "abc", refused)
    results.add("MLP", "zero3", "abc", Cell("exact"))
    results.add("LSTM", "tp", "abc", Cell("wrong", "losses by 1.0e-02"))
    results.save()
    blocks = ("counts", "plain", "reasons")
    page.write_text("".join(f"<!-- models:{name} -->\nold\n<!-- /models -->\n" for name in blocks))
    models_document.write_document()
    text = page.read_text()
    assert "old" not in text
    assert "| refused (✓ †) under tp 2 | other | MLP 97% |" in text
    assert "| **wrong** under tp 2 | language | LSTM ° |" in text
    assert "| refused | no block of 'MLP' can be split | plain/MLP (tp 2) |" in text
    assert "| tp 2 | 2 | 0 | 1 | 0 | 1 | 0 | 1 |" in text


def test_cases_are_found_by_globs_and_families():
    cases = list(find_cases().values())
    assert len(cases) >= 100
    assert {case.family for case in cases} == set(FAMILIES)
    assert [case.key for case in select_cases(cases, ["plain/nanogpt", "LSTM"], [])] == ["plain/nanoGPT", "plain/LSTM"]
    with pytest.raises(ValueError, match="no model is called 'nothing'"):
        select_cases(cases, ["nothing"], [])


def test_a_case_is_the_same_every_time_and_every_weight_of_it_moves():
    case = find_cases()["plain/MLP"]
    first, second = build(case).state_dict(), build(case).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(batch(case, 1)[0], batch(case, 1)[0])
    assert not torch.equal(batch(case, 1)[0], batch(case, 2)[0])
    assert min(train_alone(case, 2).moved.values()) > 1e-3


@pytest.mark.slow
def test_a_cell_runs_on_processes_of_its_own(tmp_path):
    case = find_cases()["plain/MLP"]
    runner = CellRunner(tmp_path, limit=120)
    assert runner.run(case, PLANS["zero3"]).status == "exact"
    refused = runner.run(case, PLANS["sp"])
    assert refused.status == "refused"
    assert refused.detail
    # Too short for a process to start, and so for the ranks: the reference is known already.
    runner.limit = 0.01
    assert runner.run(case, PLANS["zero3"]).status == "hung"


def test_a_package_that_is_not_installed_is_left_out():
    cases = [case for case in find_cases().values() if case.family == "packages"]
    assert len({case.group for case in cases}) >= 20
    missing = replace(cases[0], needs="no_such_package_at_all")
    assert not is_installed(missing)
    assert installed([missing, find_cases()["plain/MLP"]]) == [find_cases()["plain/MLP"]]


def test_packages_have_blocks_of_their_own_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(models_results, "FOLDER", tmp_path)
    monkeypatch.setattr(models_document, "DOCUMENT", page := tmp_path / "models.md")
    results = models_results.load_family("packages")
    results.add("x-transformers: GPT", "zero3", "abc", Cell("exact"))
    results.add("linformer: Linformer", "zero3", "abc", Cell("refused", "a reason"))
    results.save()
    blocks = ("counts", "packages-counts", "packages", "packages-reasons")
    page.write_text("".join(f"<!-- models:{name} -->\nold\n<!-- /models -->\n" for name in blocks))
    models_document.write_document()
    stock, _, packages = page.read_text().partition("models:packages-counts")
    assert "ZeRO 3" not in stock
    assert "| ZeRO 3 | 2 | 1 | 1 |" in packages
    assert "| ✓ under all | x-transformers | GPT |\n| refused under ZeRO 3 | linformer | Linformer |" in packages
    assert "| refused | a reason | packages/linformer: Linformer (ZeRO 3) |" in packages
