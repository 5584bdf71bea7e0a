"""The small commands: what is on this machine, whether the installation is right, text into tokens."""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorshard import cli
from tensorshard.commands import data
from tensorshard.data import TokenFile
from tensorshard.trainer import self_test
from tensorshard.weights.files.export import MAX_SHARD_SIZE


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
    assert "train.npy: 25 tokens of a vocabulary of 256" in capsys.readouterr().out
    for name in ("train", "validation"):
        tokens = TokenFile(tmp_path / "out" / f"{name}.npy").tokens
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


def test_texts_are_read_once_and_all_files_are_written_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_PIECE", 7)
    lines = "".join(f"{number}\n" for number in range(99))
    (tmp_path / "long.txt").write_text(lines)
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    read: list[str] = []
    original = Path.read_text

    def read_text(path: Path, **arguments: Any) -> str:
        read.append(path.name)
        return original(path, **arguments)

    monkeypatch.setattr(Path, "read_text", read_text)
    for text, said in {
        "short.txt": "validation.npy would be empty: the texts are too short for --validation 0.05",
        "latin.txt": "latin.txt is not UTF-8 text",
    }.items():
        assert cli.main(["data", "tokenize", str(tmp_path / text), "--output", str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err
        assert not list((tmp_path / "out").iterdir())
    for words, said in {
        (str(tmp_path),): "is a directory; name text files, such as",
        (str(tmp_path / "long.txt"), "--output", str(tmp_path / "short.txt")): "that is a file",
    }.items():
        assert cli.main(["data", "tokenize", *words]) == 2
        assert said in capsys.readouterr().err
    read.clear()
    assert cli.main(["data", "tokenize", str(tmp_path / "long.txt"), "--output", str(tmp_path / "out")]) == 0
    assert read == ["long.txt"]
    parts = [TokenFile(tmp_path / "out" / f"{name}.npy") for name in ("train", "validation")]
    assert b"".join(bytes(part.tokens) for part in parts).decode() == lines
    assert len(parts[1]) == round(0.05 * len(lines))


def test_the_help_of_export_names_the_size_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["export", "--help"])
    assert f"(default: {MAX_SHARD_SIZE})" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("columns", [60, 120])
def test_no_line_of_help_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in ("train", "generate", "export", "data", "test", "env"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        for line in capsys.readouterr().out.splitlines():
            assert len(line) <= columns or len(line.split()) <= 2, line  # a long word stays whole


@pytest.mark.parametrize("columns", [60, None])
def test_env_fits_into_a_terminal_and_is_complete_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    monkeypatch.setattr("tensorshard.commands.env.terminal_width", lambda stream: columns)
    monkeypatch.setenv("NCCL_DEBUG", " ".join(["word"] * 30))
    assert cli.main(["env"]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if len(line.split()) > 2]  # long words stay whole
    longest = max(map(len, printed))
    assert longest <= columns if columns else longest > 150


def _self_test(tolerance: float) -> str:
    self_test._TOLERANCES = {"cpu": tolerance}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            self_test.run()
        except self_test.SelfTestError as error:
            print(error)
    return printed.getvalue()


@pytest.mark.slow
def test_the_installation_is_right(ranks: Any) -> None:
    printed = ranks(2, _self_test, 1e-5)[0].splitlines()
    assert len(printed) == len(self_test.plans(2)) and all(" exact, largest difference " in line for line in printed)


def test_a_wrong_plan_is_named(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = ranks(1, _self_test, -1.0)[0]
    assert "ZeRO 3                   WRONG" in printed and "did not compute what one process does" in printed
