"""A script of one's own, in the manner of nanoGPT, trains under any plan with a few lines changed."""

import difflib
import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch

_FOLDER = Path(__file__).parents[2] / "examples" / "own_script"
_TINY = ["n_layer=2", "n_head=2", "n_embd=32", "block_size=16", "batch_size=4", "max_iters=3"]
_TINY += ["eval_interval=1", "eval_iters=1", "log_interval=1", "warmup_iters=1", "grad_clip=0.5"]


def _printed(script: str, *words: str) -> str:
    """What `script` prints on this rank with these settings."""
    printed = io.StringIO()
    with redirect_stdout(printed), mock.patch.object(sys, "argv", [script, *_TINY, *words]):
        runpy.run_path(str(_FOLDER / script), run_name="__main__")
    return printed.getvalue()


def _all_printed(runs: list[list[str]]) -> list[str]:
    return [_printed(*words) for words in runs]


def _figures(printed: str, names: str = "loss|norm") -> list[float]:
    return [float(figure) for figure in re.findall(rf"(?:{names}) ([\d.]+)", printed)]


@pytest.mark.slow
def test_a_nanogpt_script_trains_as_one_process_does(ranks, tmp_path):
    runs = [
        ["train_sharded.py"],
        ["train_sharded.py", "tp=2", f"out={tmp_path / 'tp'}"],
        ["train_any_plan.py", "pp=2"],
        ["train_sharded.py", "dtype=bfloat16"],
    ]
    single, single_bf16 = ranks(
        1, _all_printed, [["train.py", f"out={tmp_path / 'one'}"], ["train.py", "dtype=bfloat16"]]
    )[0]
    zero3, tp, pp, bf16 = ranks(2, _all_printed, runs)[0]
    expected = _figures(single)
    assert len(expected) == 4 * 2 + 3 * 2
    for found in (zero3, tp):
        assert _figures(found) == pytest.approx(expected, abs=2e-4)  # norms are printed to four digits
    names = "train loss|val loss|norm"  # engine.step returns the mean over the step's micro-batches
    assert _figures(pp, names) == pytest.approx(_figures(single, names), abs=2e-4)
    assert _figures(bf16) == pytest.approx(_figures(single_bf16), rel=1e-2)
    one, other = (torch.load(tmp_path / name) for name in ("one", "tp"))
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("after", ["train_sharded.py", "train_any_plan.py"])
def test_few_lines_are_changed_and_a_file_shows_them(after):
    before, changed = (_FOLDER / "train.py").read_text(), (_FOLDER / after).read_text()
    lines = list(difflib.unified_diff(before.splitlines(), changed.splitlines(), "train.py", after, n=1, lineterm=""))
    assert sum(line.startswith("+") for line in lines[2:]) <= 25
    assert sum(line.startswith("-") for line in lines[2:]) <= 25
    if after == "train_sharded.py":
        assert (_FOLDER / "train_sharded.diff").read_text() == "\n".join(lines) + "\n"
