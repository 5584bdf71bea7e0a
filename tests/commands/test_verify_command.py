"""``tensorshard verify``: what it prints, its exit status, and what it refuses."""

import json
from pathlib import Path

import pytest

from tensorshard import cli

_CONFIG = """
import torch
from torch import nn
from tensorshard.config import LazyCall, get_config
from tensorshard.data import StdlibText
from tensorshard.models import GPT, next_token_loss


class Uneven(GPT):
    def forward(self, tokens):
        return super().forward(tokens) * (1 + tokens.float().mean())  # of this rank's samples alone


train = get_config("common/train.py").train
optimizer = get_config("common/optim.py").optimizer
scheduler = get_config("common/optim.py").scheduler
model = LazyCall(GPT)(vocab_size=256, context_length=16, num_layers=5, num_heads=2, width=16)
loss = LazyCall(next_token_loss, partial=True)()
data = dict(train=LazyCall(StdlibText)(split="train", context_length=16), validation=None)
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.py"
    path.write_text(_CONFIG)
    return str(path)


@pytest.mark.slow
def test_an_exact_plan_is_said_to_be_and_written(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, found = tmp_path / "page.html", tmp_path / "found.json"
    assert cli.main(["verify", config, "train.plan.zero=3", "--html", str(page), "--json", str(found)]) == 0
    printed = capsys.readouterr().out
    assert "exact, 2 ranks against one process, 3 steps" in printed and "2 of 5 blocks" in printed
    assert "Exact" in page.read_text()
    kept = json.loads(found.read_text())
    assert kept["exact"] and kept["hash"] in printed


@pytest.mark.slow
def test_what_differs_is_named_and_the_exit_status_is_1(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(config).write_text(_CONFIG.replace("LazyCall(GPT)", "LazyCall(Uneven)"))
    assert cli.main(["verify", config, "--world-size", "2", "--steps", "1"]) == 1
    printed = capsys.readouterr().out
    assert "NOT EXACT" in printed and "culprit" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no config was given"),
        (["train.plan.tp=2"], "no config was given"),
        (["quickstart", "--world-size", "0"], "--world-size is 0"),
        (["quickstart", "--steps", "0"], "--steps is 0"),
        (["quickstart", "--html", "nowhere/page.html"], "--html nowhere/page.html: it cannot be written"),
        (["quickstart", "train.plan=auto"], "'auto' leaves the plan to a search"),
        (
            ["quickstart", "train.plan.tp=3", "--world-size", "4"],
            "tp=3 needs a multiple of 3 processes, and there are 4",
        ),
        (["quickstart", "train.plan.pp=5", "--world-size", "5"], "micro_batches"),
        (["nothing.py"], "nothing.py"),
    ],
)
def test_bad_input_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
