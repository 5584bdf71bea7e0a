"""A refusal that ends all processes of a script is written once, with the line of the user's code."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.comm.call_watch import add_cause
from tensorshard.comm.refusals import FULL, is_refusal, report_refusals_once


def _refused() -> ValueError:
    try:
        ts.Plan(tp=7, dp_shard=1).resolve(2)
    except ValueError as error:
        return error
    raise AssertionError


def _written(make_error: Callable[[], Exception]) -> str:
    """What the process that ends with `error` writes."""
    error, usual, out = make_error(), sys.excepthook, io.StringIO()
    sys.excepthook = lambda *_: print("the whole traceback", file=sys.stderr)
    try:
        report_refusals_once.__wrapped__()
        with contextlib.redirect_stderr(out):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.excepthook = usual
    return out.getvalue()


def test_rank_0_writes_it_and_the_others_a_line(ranks):
    first, second = ranks(2, _written, _refused)
    lines = first.splitlines()
    assert f'File "{Path(__file__)}"' in lines[0] and len(lines) == 3
    assert "multiply to 7" in lines[1] and "torchrun --nproc-per-node 7" in lines[1] and FULL in lines[2]
    assert second == "ValueError, as on rank 0\n"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_launcher_reports_one_cause(tmp_path, processes):
    script = tmp_path / "script.py"
    script.write_text(
        "import tensorshard as ts, torch\nts.parallelize(torch.nn.Linear(2, 2), ts.Plan(tp=7), "
        "optimizer=torch.optim.AdamW, loss_fn=torch.nn.functional.mse_loss)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), str(script)]
    environment = {name: value for name, value in os.environ.items() if name != FULL}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert run.returncode == 1
    report = run.stderr[run.stderr.rindex("Root Cause") :].splitlines()  # another rank may have failed at that moment
    assert (
        len(report) == 9
        and "ValueError: tp=7 needs a multiple of 7" in report[-2]
        and "--nproc-per-node 7" in report[-2]
    )


def _other_error() -> Exception:
    try:
        nn.Linear(2, 3)(None)
    except TypeError as error:
        return error
    raise AssertionError


def _left_alone() -> Exception:
    """What a rank raises that another one has left in a collective."""
    try:
        nn.Linear(2, 3)(torch.ones(1, 4))
    except RuntimeError as error:
        add_cause(error, "engine.save", "rank 1 called engine.step while rank 0 called engine.save")
        return error
    raise AssertionError


def test_a_call_of_one_rank_alone_is_written_without_a_traceback(ranks):
    for written in ranks(2, _written, _left_alone):
        lines = written.splitlines()
        assert f'File "{Path(__file__)}"' in lines[0] and len(lines) <= 3
        assert lines[1].startswith("RuntimeError: engine.save could not end: rank 1 called engine.step")


def test_other_errors_keep_their_traceback(ranks):
    assert not is_refusal(_other_error()) and is_refusal(_refused())
    assert ranks(2, _written, _other_error) == ["the whole traceback\n"] * 2
