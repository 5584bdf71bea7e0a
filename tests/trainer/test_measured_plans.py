"""``tensorshard plan --measure``: the best plans are really run, and the fastest comes first."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tensorshard as ts
from tensorshard import cli
from tensorshard.predict.hardware import Hardware
from tensorshard.predict.search import FoundPlan, PlanSearch
from tensorshard.trainer import measured_plans
from tensorshard.trainer.launch.launch_errors import WorkerFailedError

SMALL = ["quickstart", "model.num_layers=2", "model.width=32", "model.context_length=16", "train.global_batch_size=4"]
FIXED = {"pp": 1, "tp": 1, "recompute": "none", "offload": "null", "micro_batches": 1, "dp_replicate": 1}


@pytest.mark.slow
def test_the_best_plans_are_run_on_this_machine_and_the_fastest_is_saved(tmp_path: Path, capsys):
    words = [*SMALL, *(f"train.plan.{name}={value}" for name, value in FIXED.items())]
    saved = tmp_path / "plan.yaml"
    assert cli.main(["plan", *words, "--world-size", "2", "--top", "3", "--measure", "2", "--save", str(saved)]) == 0
    printed = capsys.readouterr().out
    head, *rows = printed.splitlines()[2:6]
    assert head.split() == ["measured", "a", "step", "a", "rank", "plan"]
    assert max(map(len, printed.split("\nplan")[0].splitlines())) <= 80
    assert f"zero={ts.Plan.from_yaml(saved).zero}" in rows[0]
    assert [len(row.split()) for row in rows] == [9, 9, 7]  # the third was not run


def _found(*levels: int) -> PlanSearch:
    largest: Any = SimpleNamespace(
        largest=SimpleNamespace(peak_device=1 << 20), time_words=lambda seconds: f"{seconds:.2f} s"
    )
    plans = [FoundPlan(ts.Plan(zero=level).resolve(2), largest, 1.0 + level, []) for level in levels]
    return PlanSearch(plans, [], Hardware("some", 1 << 30), 1 << 30, 2, 4, len(plans), len(plans), True)


def test_the_fastest_comes_first_and_a_plan_that_fails_last(monkeypatch):
    seconds = {0: 3.0, 1: None, 2: 2.0}

    def launch(_: Any, args: Any, world: Any) -> None:
        assert world.nproc == 2
        _, plan, global_batch, results = args
        took = seconds[plan["zero"]]
        assert global_batch == 4
        if took is None:
            error = WorkerFailedError.__new__(WorkerFailedError)
            RuntimeError.__init__(error, "rank 0 of 2 was killed\nout of memory")
            raise error
        Path(results).write_text(json.dumps(took))

    monkeypatch.setattr(measured_plans, "launch", launch)
    found = measured_plans.measure_plans(_found(0, 1, 2, 3), SimpleNamespace(), 3)
    assert [one.plan.zero for one in found] == [2, 0, 3, 1]
    assert [one.measured_seconds for one in found] == [2.0, 3.0, None, None]
    assert found.plans[-1].failed == "out of memory"
    said = found.describe()
    assert "  1      2.00 s " in said and "failed" in said and "of plan 4:\n  failed: out of memory" in said
    assert "measured" not in replace(found, plans=_found(0).plans).describe()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--measure", "-1"], "the number of plans to run must be at least 1"),
        (["--measure", "--gpu", "h100"], "--measure runs plans on this machine, and --gpu h100 names another"),
    ],
)
def test_what_measure_refuses(options, said, capsys):
    assert cli.main(["plan", *SMALL, "--world-size", "2", *options]) == 2
    assert said in capsys.readouterr().err
