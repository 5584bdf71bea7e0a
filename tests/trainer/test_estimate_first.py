"""What is said of memory before a run starts, and what is refused."""

import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

import tensorshard as ts
from tensorshard.comm.forked import ForkFailed, in_forked_process
from tensorshard.config import ConfigError
from tensorshard.predict import Estimate, RankEstimate
from tensorshard.predict.rank_estimate import CATEGORIES
from tensorshard.trainer import estimated_run as module
from tensorshard.trainer.estimated_run import estimate_first
from tensorshard.trainer.report import print_summary
from tensorshard.trainer.run_directory import RunDirectory

MIB = 1 << 20
CONFIG = OmegaConf.create({})


def _found(*peaks: int, ranks_per_stage: int = 2) -> Estimate:
    held = dict.fromkeys(CATEGORIES, 0)
    ranks = [
        RankEstimate(ranks_per_stage * stage, stage, peak, peak, peak, held | {"activations": peak}, "forward", [], [])
        for stage, peak in enumerate(peaks)
    ]
    world_size = ranks_per_stage * len(peaks)
    return Estimate(ts.Plan(pp=len(peaks), micro_batches=2).resolve(world_size), world_size, ranks)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "estimate_run", lambda *_, **__: _found(30 * MIB, 20 * MIB))
    monkeypatch.setattr(module, "available_on_host", lambda: 90 * MIB)
    monkeypatch.setattr(module, "memory_of_gpus", lambda: 25 * MIB)


def test_what_fits(found: None) -> None:
    found_first, lines = estimate_first(CONFIG, 4, 2, gpus=False, force=False)  # two machines
    assert found_first is not None and found_first.peaks == [30 * MIB, 30 * MIB, 20 * MIB, 20 * MIB]
    assert lines[-1].startswith("fits: 60.0 MiB of live tensors on this machine's 2 ranks, of 90.0 MiB")
    assert "stage" in lines[0] and "activations, 100%" in lines[1]


@pytest.mark.parametrize(
    ("gpus", "needed", "hint"), [(False, "100 MiB .* 4 ranks, of 90.0 MiB", "22MiB"), (True, "30.0 MiB", "25MiB")]
)
def test_what_cannot_fit_is_refused(found: None, gpus: bool, needed: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{needed}.*--memory {hint}.*--force"):
        estimate_first(CONFIG, 4, 4, gpus=gpus, force=False)
    assert estimate_first(CONFIG, 4, 4, gpus=gpus, force=True)[1][-1].startswith("does not fit")


def test_what_cannot_be_estimated_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise NotImplementedError("aten.nonzero has no fake kernel\nmore")

    monkeypatch.setattr(module, "estimate_run", fails)
    assert estimate_first(CONFIG, 2, 2, gpus=False, force=False) == (
        None,
        ["no estimate of memory: aten.nonzero has no fake kernel"],
    )


@pytest.mark.parametrize(
    ("expected", "shown"), [([700 * MIB, 800 * MIB], True), ([7 * MIB, 8 * MIB], False), (None, False)]
)
def test_the_summary_has_estimated_and_measured_where_these_compare(
    tmp_path: Path, expected: list[int] | None, shown: bool
) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_summary(
        console,
        steps=3,
        figures={"loss": 1.0},
        peak_bytes=[300 * MIB, 301 * MIB],
        above_start=[9 * MIB, 10 * MIB],
        expected=None if expected is None else _found(*expected, ranks_per_stage=1),
        directory=RunDirectory(tmp_path),
    )
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("rank 0: 700 MiB  rank 1: 800 MiB" in said) is shown is ("rank 0: 9.00 MiB" in said)
    assert "7.00 MiB" not in said
    assert "rank 0: 300 MiB" in said
    assert ("predicted" in said) is (expected is not None)


def _raises() -> None:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("work", "why"),
    [(_raises, "'lost'"), (lambda: time.sleep(60), "more than 0.5 s"), (lambda: os._exit(3), "ended with code 3")],
)
def test_a_fork_that_fails(work: Any, why: str) -> None:
    with pytest.raises(ForkFailed, match=why):
        in_forked_process(work, 0.5 if "0.5" in why else 60)


def test_a_fork_hands_in_what_it_found() -> None:
    assert in_forked_process(lambda: (os.getpid(), 7), 60)[1] == 7
