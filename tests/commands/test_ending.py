"""A run that ended early: how far it came, where its files are, and the command that goes on."""

import json
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from tensorshard import cli
from tensorshard.commands.ending import ending_of
from tensorshard.trainer.launch import launcher
from tensorshard.trainer.launch.launch_errors import LaunchInterrupted
from tensorshard.trainer.launch.worker import told
from tensorshard.trainer.run_directory import RunDirectory


@pytest.fixture
def config() -> DictConfig:
    asked = {"config": "mine.py", "overrides": ["train.name=it's"], "options": ["--nproc", "4"]}
    return OmegaConf.create({"train": {"checkpoint_dir": None}, "asked": asked})


def _logged(folder: Path) -> Path:
    folder.mkdir()
    lines = [{"step": step, "loss": 2.0 / step, "step_seconds": 0.5} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_it_goes_on_at_the_newest_checkpoint(
    config: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _logged(tmp_path / "run")
    monkeypatch.setattr(RunDirectory, "newest_checkpoint", lambda self: self.checkpoint(2))
    said = ending_of(config, folder).splitlines()
    assert said[-2] == "the checkpoint is after step 2; continue with:"
    assert said[-1] == f"""tensorshard train mine.py 'train.name=it'"'"'s' --nproc 4 --output {folder} --resume"""
    assert any(line.split()[:2] == ["steps", "3,"] for line in said)
    assert any(line.startswith("checkpoint ") and line.endswith("step-2") for line in said)


def test_without_a_checkpoint_it_begins_anew(config: DictConfig, tmp_path: Path) -> None:
    assert ending_of(config, tmp_path / "none") == ""  # nothing was trained
    said = ending_of(config, _logged(tmp_path / "run")).splitlines()
    assert said[-2] == "no checkpoint was written yet; begin anew with:"
    assert said[-1] == """tensorshard train mine.py 'train.name=it'"'"'s' --nproc 4"""


def test_a_run_that_has_said_so_itself_is_not_told_again(tmp_path: Path) -> None:
    noted = tmp_path / "run"
    assert launcher._ending(tmp_path, str) == ""
    noted.write_text("runs/x-1")
    assert launcher._ending(tmp_path, str) == "runs/x-1" and launcher._ending(tmp_path, None) == ""
    told(noted).touch()
    assert launcher._ending(tmp_path, str) == ""


def test_the_command_line_prints_it_last(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def launch(*_: object, **__: object) -> None:
        raise LaunchInterrupted(launcher.signal.SIGTERM, "continue with: this")

    monkeypatch.setattr(launcher, "launch", launch)
    assert cli.main(["train", "quickstart", "--no-estimate", "--nproc", "1"]) == 143
    assert capsys.readouterr().err == "\ncontinue with: this\n"
