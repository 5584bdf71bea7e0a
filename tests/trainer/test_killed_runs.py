"""Runs that are killed at random instants, and resumed, end as the undisturbed run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import killed_runs


@pytest.mark.slow
@pytest.mark.parametrize("nproc, kills", [(4, 100) if "TENSORSHARD_WHOLE_GRID" in os.environ else (2, 10)])
def test_kills_lose_nothing_but_the_steps_since_the_last_save(nproc: int, kills: int, tmp_path: Path) -> None:
    out = tmp_path / "kills.json"
    options = ["--kills", str(kills), "--nproc", str(nproc), "--out", str(out)]
    # A process of its own, as forks need one without threads.
    ended = subprocess.run(
        [sys.executable, killed_runs.__file__, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(out.read_text())["tensorshard"]
    assert result["faults"] == []
    assert result["kills"] >= kills


def test_the_page_has_the_figures_of_the_script() -> None:
    results = json.loads(Path(killed_runs.__file__).with_suffix(".json").read_text())
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    kills, found = results["tensorshard"]["kills"], results["tensorshard"]["found after a kill"]
    assert kills == found["whole"] + found["nothing yet"]
    assert f"killed {kills:,} times" in page
    kills, found = results["dcp"]["kills"], results["dcp"]["found after a kill"]
    unreadable = sum(count for state, count in found.items() if state.startswith("unreadable"))
    mixed = found["loads, and mixes two saves"]
    assert found["whole"] + found["nothing yet"] + unreadable + mixed == kills
    page = " ".join(page.split())
    assert f"left nothing that loads {unreadable} times in {kills}, and tensors of two saves {mixed} times" in page
