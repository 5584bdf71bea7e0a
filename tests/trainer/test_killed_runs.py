"""Runs that are killed at random instants, and resumed, end as the undisturbed run."""

import os
from pathlib import Path

import pytest

from killed_runs import kill_and_resume, undisturbed


@pytest.mark.slow  # each start imports torch
@pytest.mark.parametrize("nproc, runs", [(4, 3) if "TENSORSHARD_WHOLE_GRID" in os.environ else (2, 1)])
def test_kills_lose_nothing_but_the_steps_since_the_last_save(nproc: int, runs: int, tmp_path: Path) -> None:
    seconds = undisturbed(tmp_path, nproc)
    outcomes = [kill_and_resume(tmp_path, nproc, seed, seconds) for seed in range(runs)]
    assert [fault for outcome in outcomes for fault in outcome.faults] == []
    assert sum(sum(outcome.kills.values()) for outcome in outcomes) >= runs
