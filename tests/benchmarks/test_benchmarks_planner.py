"""The planner's benchmark: how good a choice is, what is written of it, and that its ranks run."""

import pytest
from benchmarks.harness.jobs import run_job
from benchmarks.harness.planner_document import PlannerResults, markdown_runs, markdown_scale
from benchmarks.harness.planner_models import MODELS
from benchmarks.harness.planner_runs import GRID, ModelRuns, PlanRun, RunsJob
from benchmarks.harness.planner_scale import SCALES, ScaleFinding

from tensorshard import Plan

RUNS = ModelRuns(
    "GPT",
    [
        PlanRun("zero=0", 0.5, 100, 0.6, 2.2),
        PlanRun("zero=3", 0.6, 50, 0.5, 2.0, chosen=True),
        PlanRun("tp=2", 0.8, 80, 0.9, 3.1),
        PlanRun("pp=4", refused="no blocks"),
    ],
    search_seconds=3.0,
)


def test_regret_is_what_the_choice_takes_beyond_the_best():
    assert RUNS.regret(wall=False) == 0 and RUNS.regret(wall=True) == 0
    RUNS.runs[0].busy, RUNS.runs[0].wall = 1.6, 0.4
    assert abs(RUNS.regret(wall=False) - 0.25) < 1e-9 and abs(RUNS.regret(wall=True) - 0.25) < 1e-9
    assert [run.name for run in RUNS.valid] == ["zero=0", "zero=3", "tp=2"]


def test_tables_of_what_was_found():
    published = ScaleFinding(
        "175B", "1,024 x a100-80", "tp=8", 10.0, 2**34, 9, 2, 5.0, 2**30, "others", "tp=4", (12.0, 2**35)
    )
    results = PlannerResults({"GPT": RUNS}, {"175B": published}, {})
    rows = markdown_runs(results).splitlines()
    assert rows[2].startswith("| GPT | 3 |") and "`zero=3`" in rows[2]
    assert rows[3].startswith("| **median**") and rows[4].startswith("| **worst**")
    assert "| 12.00 s | 32.0 GiB |" in markdown_scale(results)


def test_plans_of_the_grid_and_of_others_are_plans():
    assert len({Plan(**fields).resolve(4) for fields in GRID}) == len(GRID)
    for scale in SCALES.values():
        if scale.published is not None:
            plan = Plan.from_dict({**scale.fixed, **scale.published}).resolve(scale.devices)
            assert scale.global_batch % (plan.dp_size * plan.micro_batches) == 0
    assert len(MODELS) == 8


@pytest.mark.slow
def test_ranks_run_plans_in_turn():
    job = RunsJob("LSTM", [dict(zero=0), dict(zero=2), dict(pp=4)], rounds=2)
    ranks = run_job(
        "benchmarks.harness.planner_runs_rank",
        job,
        2,
        environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    for rank in ranks:
        assert rank["refused"][:2] == ["", ""] and rank["refused"][2]
        assert [len(times) for times in rank["busy"]] == [2, 2, 0] == [len(times) for times in rank["wall"]]
        assert min(min(times) for times in rank["busy"][:2]) > 0
