"""The first checks of GPUs, tried on the processor, and what they say where there is no GPU, or a check goes wrong."""

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import __main__ as benchmarks
from benchmarks.harness import gpu_checks
from benchmarks.harness.gpu_checks import FIRST, MULTI, Check, Verdict, run_checks
from benchmarks.harness.gpu_checks_rank import _CHECKS


def _main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu", *arguments])
    return benchmarks.main()


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    assert _main(monkeypatch, "--first") == 1
    assert "needs a GPU, and PyTorch sees none here" in capsys.readouterr().err


def test_every_check_has_its_function():
    assert {check.name for check in (*FIRST, *MULTI) if not check.tests} == set(_CHECKS)
    for checks in (FIRST, MULTI):
        assert len({check.name for check in checks}) == len(checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("--first", ("host_waits", "recompute")),
        pytest.param("--first", (), marks=pytest.mark.slow),
        pytest.param("--multi", (), marks=pytest.mark.slow),
    ],
)
def test_checks_run_on_the_processor(monkeypatch, capsys, tmp_path, kind, names):
    output = tmp_path / "found.json"
    only = ["--only", *names] if names else []
    assert _main(monkeypatch, kind, "--device", "cpu", "--output", str(output), *only) == 0, capsys.readouterr().out
    found = json.loads(output.read_text())
    checks = {check.name: check for check in (FIRST if kind == "--first" else MULTI)}
    assert [verdict["name"] for verdict in found["checks"]] == list(names or checks)
    for verdict in found["checks"]:
        assert verdict["verdict"] == ("ok" if checks[verdict["name"]].on_cpu else "skipped")
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert "nothing wrong" in capsys.readouterr().out


def test_what_goes_wrong_is_told(monkeypatch, tmp_path):
    """A check that finds something, one that raises, one whose ranks end as if nothing had happened, one too late."""
    outcomes = [{"found": {"difference": 1.0}, "wrong": ["losses differ"]}, {"found": {}, "wrong": ["losses differ"]}]
    monkeypatch.setattr(gpu_checks, "run_job", lambda *_, **__: outcomes)
    monkeypatch.setattr(gpu_checks, "run_ranks", lambda *_, **__: None)
    told: list[Verdict] = []
    checks = (Check("parity", "losses"), Check("rank_raises", "an error", ends="one rank alone"))
    run_checks(checks, "cpu", 2, 60.0, told.append)

    def fails(*_, **__):
        raise gpu_checks.RankError("rank 1 of 2 failed: CUDA error")

    monkeypatch.setattr(gpu_checks, "run_job", fails)
    monkeypatch.setattr(gpu_checks, "run_ranks", fails)
    run_checks((*checks, Check("memory", "memory", on_cpu=False)), "cpu", 2, 60.0, told.append)
    run_checks(checks[:1], "cpu", 2, -1.0, told.append)
    assert [verdict.verdict for verdict in told] == ["wrong", "wrong", "failed", "failed", "skipped", "skipped"]
    assert told[0].wrong == ["losses differ"] and told[0].found == {"difference": 1.0}
    assert "CUDA error" in told[2].wrong[0] and "minutes were over" in told[-1].wrong[0]
    gpu_checks.write_verdicts(Path(tmp_path / "found.json"), told, {"ranks": 2})
    assert len(json.loads((tmp_path / "found.json").read_text())["checks"]) == 6
