"""Runs whose processes are killed come back by themselves, and end with the losses of an undisturbed run."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_trainer_run import CONFIG

from rank_pool import RankPool
from tensorshard.config import load_config
from tensorshard.trainer.loggers import read_metrics
from tensorshard.trainer.run import run

_TEXT = CONFIG.replace("mse_loss, partial=True)()", "failing_loss, partial=True)()").replace(
    "import Sums, SmallNet", "import Sums, SmallNet\nfrom test_restarts import failing_loss"
)
_calls = itertools.count(1)


def failing_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Fails once in a run, in the seventh step, as the environment says."""
    call = next(_calls) if torch.is_grad_enabled() else 0
    marker = Path(os.environ.get("FAIL_ONCE", "/nowhere/none"))
    if call == 7 and os.environ["RANK"] == "1" and marker.parent.is_dir() and not marker.exists():
        marker.touch()
        if marker.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("a file system went away")
    return F.mse_loss(output, targets)


def _train(config: Path, *options: str, marker: Path, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tensorshard.cli", "train", str(config), *options, "--nproc", str(nproc)]
    environment = {**os.environ, "FAIL_ONCE": str(marker), "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.run(
        command, cwd=config.parent, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def _undisturbed(config: Path, output: Path) -> None:
    run(load_config(config, allow=["test_trainer_run", "test_restarts"]), output=str(output))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(_TEXT)
    return file


def _losses(folder: Path) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "rank 1 was killed, or ended without a message; restart 1 of at most 2"),
        ("raised", "rank 1 failed: OSError: a file system went away; restart 1 of at most 2"),
    ],
)
def test_a_run_goes_on_by_itself(ranks: RankPool, config: Path, tmp_path: Path, how: str, said: str) -> None:
    ranks(2, _undisturbed, config, tmp_path / "undisturbed")
    ended = _train(config, "--output", "run", "--max-restarts", "2", marker=tmp_path / how)
    assert ended.returncode == 0, ended.stderr
    assert said in ended.stderr
    assert "continuing in run, steps 5 to 10" in ended.stdout
    assert _losses(tmp_path / "run") == _losses(tmp_path / "undisturbed")


@pytest.mark.slow
def test_before_the_first_checkpoint_it_begins_anew(ranks: RankPool, config: Path, tmp_path: Path) -> None:
    ranks(2, _undisturbed, config, tmp_path / "undisturbed")
    ended = _train(config, "train.save_every=8", "--max-restarts", "1", marker=tmp_path / "killed")
    assert ended.returncode == 0, ended.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert _losses(folder) == _losses(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_mistake_is_told_once(config: Path, tmp_path: Path) -> None:
    ended = _train(config, "train.plan.tp=2", "model.no_such=1", "--max-restarts", "3", marker=tmp_path / "none")
    assert ended.returncode == 2 and "restart" not in ended.stderr, ended.stderr
