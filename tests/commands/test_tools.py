"""The small commands: what is on this machine, whether the installation is right, text into tokens."""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorshard import cli
from tensorshard.data import TokenFile
from tensorshard.trainer import self_test


def test_the_command_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("train", "generate", "export", "data", "test", "env"))


def test_env_says_what_there_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert cli.main(["env"]) == 0
    printed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    lines = {words[0]: words[1] for words in printed if len(words) == 2}  # a variable may be empty
    assert lines["torch"] == torch.__version__ and lines["NCCL_DEBUG"] == "INFO" and "gloo" in lines["backends"]


def test_text_becomes_token_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("äb\n" * 10)
    (tmp_path / "b.txt").write_text("c" * 10)
    words = ["data", "tokenize", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--output", str(tmp_path / "out")]
    assert cli.main([*words, "--validation", "0.5"]) == 0
    assert "train.tokens: 25 tokens of a vocabulary of 256" in capsys.readouterr().out
    for name in ("train", "validation"):
        tokens = TokenFile(tmp_path / "out" / f"{name}.tokens").tokens
        assert np.array_equal(tokens, np.frombuffer(("äb\n" * 5 + "c" * 5).encode(), dtype=np.uint8))
    for extra, said in {
        (): "is there already; give another --output, or --overwrite",
        ("--validation", "1.5"): "it is the share of a text",
        ("--tokenizer", "none.json"): "there is no tokenizer none.json",
    }.items():
        assert cli.main([*words, *extra]) == 2
        assert said in capsys.readouterr().err
    for bad in (["data"], ["data", "tokenize"], ["data", "tokenize", "none.txt"], ["data", "count", "a.txt"]):
        assert cli.main(bad) == 2
    assert cli.main([*words, "--validation", "0", "--overwrite"]) == 0


def _self_test(tolerance: float) -> str:
    self_test._TOLERANCE = tolerance
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            self_test.run()
        except self_test.SelfTestError as error:
            print(error)
    return printed.getvalue()


def test_the_installation_is_right(ranks: Any) -> None:
    printed = ranks(2, _self_test, 1e-5)[0].splitlines()
    assert len(printed) == len(self_test.plans(2)) and all(" exact, largest difference " in line for line in printed)


def test_a_wrong_plan_is_named(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = ranks(1, _self_test, -1.0)[0]
    assert "ZeRO 3                   WRONG" in printed and "did not compute what one process does" in printed
