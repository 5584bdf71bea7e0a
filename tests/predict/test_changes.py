"""What would make a plan fit: by a made-up memory of plans, and from the command line."""

import contextlib
import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import tensorshard as ts
from tensorshard import cli
from tensorshard.common.progress import TimeIsUp, progress
from tensorshard.common.words import size_text
from tensorshard.config import load_config
from tensorshard.predict.changes import Change, find_changes
from tensorshard.trainer.estimated_run import EstimatedRun

MIB = 1 << 20
PLAN = ts.Plan(zero=0).resolve(8)


def _needed(plan: ts.Plan) -> int:
    """100 bytes of states, of which ZeRO 3 leaves an eighth, and 100 of activations, which micro-batches divide."""
    if plan.offload is not None or plan.sequence_parallel:
        raise ValueError("cannot be told")
    states = 100 // (plan.dp_shard if plan.zero == 3 else 1) // plan.tp
    return states + 100 // plan.micro_batches // plan.tp


@pytest.mark.parametrize(
    ("memory", "changes"),
    [
        (150, ["micro_batches=2", "zero=3", "tp=2 dp_shard=4"]),
        (60, ["tp=4 dp_shard=2"]),
        (23, ["zero=3 micro_batches=8 tp=8 dp_shard=1"]),
    ],
)
def test_the_cheapest_changes_that_fit(memory, changes):
    found = list(find_changes(PLAN, memory, _needed, batch=8))
    assert [change.words for change in found] == changes
    assert all(change.needed <= memory for change in found)


def test_where_nothing_fits_what_needs_the_least_is_named():
    found = list(find_changes(PLAN, 1, _needed, batch=8))
    assert [change.words for change in found] == ["zero=3 micro_batches=8 tp=8 dp_shard=1"]
    assert found[0].needed == _needed(replace(PLAN, zero=3, micro_batches=8, tp=8, dp_shard=1))


def test_sequences_are_split_where_layers_are():
    def needed(plan: ts.Plan) -> int:
        return _needed(replace(plan, sequence_parallel=False)) // (plan.tp if plan.sequence_parallel else 1)

    split = replace(PLAN, tp=2, dp_shard=4)
    words = [change.words for change in find_changes(split, 60, needed, batch=4)]
    assert words[0] == "sequence_parallel=True"
    whole = list(find_changes(PLAN, 4, needed, batch=1))
    assert [change.words for change in whole] == ["tp=8 dp_shard=1 sequence_parallel=True"]


def test_the_nearest_is_said_when_the_search_is_interrupted():
    def needed(plan: ts.Plan) -> int:
        if plan.zero == 3:
            raise KeyboardInterrupt
        return _needed(plan)

    found = find_changes(PLAN, 1, needed, batch=8)
    assert next(found).words == "micro_batches=8"
    with pytest.raises(KeyboardInterrupt):
        next(found)


def test_micro_batches_divide_the_batch():
    found = list(find_changes(PLAN, 150, _needed, batch=3))
    assert [change.words for change in found if "micro_batches" in change.words] == ["micro_batches=3"]


def test_a_kind_of_change_that_is_not_enough_is_tried_once():
    tried = []

    def needed(plan: ts.Plan) -> int:
        tried.append(plan.micro_batches)
        return 1000

    assert not list(find_changes(PLAN, 150, needed, batch=16))  # nothing helps
    assert next(count for count in tried if count > 1) == 16


def test_what_was_found_when_the_time_is_over(monkeypatch):
    run = EstimatedRun(load_config("quickstart", []), 2)
    estimate = run.estimate()
    monkeypatch.setattr(run, "estimate", mock.Mock(side_effect=[estimate, estimate, TimeIsUp]))
    with progress("looking", until=time.monotonic() + 100):
        changes, ended = run.changes_that_fit(estimate, estimate.largest.peak_device)
    assert (len(changes), ended) == (1, "its time was over")


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, RuntimeError])
def test_changes_that_the_model_does_not_suit_are_left_out(error):
    def needed(plan: ts.Plan) -> int:
        if plan.zero == 3:
            raise error("the forward fails")
        return _needed(plan)

    found = find_changes(PLAN, 150, needed, batch=8)
    assert [change.words for change in found] == [
        "micro_batches=2",
        "tp=2 dp_shard=4",
        "pp=2 dp_shard=4 micro_batches=4",
    ]


def test_sizes():
    assert [size_text(n) for n in (12, 1536, 20 * 2**20, 700 * 2**30)] == ["12 B", "1.50 KiB", "20.0 MiB", "700 GiB"]


def _command(words: str, folder: Path) -> tuple[int, str]:
    """The command, its search for changes replaced: that one would estimate several plans."""
    if dist.is_initialized():
        dist.destroy_process_group()
    found = [Change("zero=1", "no more traffic", MIB), Change("tp=2 dp_shard=1 micro_batches=4", "much " * 9, 2 * MIB)]
    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        mock.patch("tensorshard.trainer.estimated_run.find_changes", lambda *_, **__: found),
    ):
        code = cli.main(["estimate", *words.split()])
    return code, printed.getvalue()


def test_the_command_says_what_would_fit(ranks: Any, tmp_path: Path) -> None:
    tiny = "quickstart model.num_layers=1 model.width=16 train.plan.zero=0"
    code, said = ranks(1, _command, f"{tiny} --world-size 2 --memory 1KiB --html page.html", tmp_path)[0]
    assert code == 1 and said.startswith("does not fit: ")
    assert "page       page.html" in said and "</html>" in (tmp_path / "page.html").read_text()
    assert "\n  zero=1                    1.00 MiB  no more traffic\n" in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_the_command_takes_the_plan_of_a_file(ranks: Any, tmp_path: Path) -> None:
    ts.Plan(zero=3, recompute="full").to_yaml(tmp_path / "plan.yaml")
    tiny = "quickstart model.num_layers=1 model.width=16"
    code, said = ranks(1, _command, f"{tiny} train.plan=plan.yaml --world-size 2 --memory 1GiB", tmp_path)[0]
    assert code == 0 and "gathered parameters" in said and "recompute      full" in said


def test_the_command_says_who_searches_for_a_plan(capsys: Any) -> None:
    assert cli.main(["estimate", "quickstart", "train.plan=auto", "--world-size", "2"]) == 2
    assert "'tensorshard plan' searches" in capsys.readouterr().err
