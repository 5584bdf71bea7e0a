"""Runs whose checkpoints are in an object store, and what reads them from there."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from test_trainer_run import CONFIG, SmallNet

import tensorshard as ts
from rank_pool import RankPool
from tensorshard import cli
from tensorshard.checkpoint.integrity import is_whole
from tensorshard.config import ConfigError, load_config
from tensorshard.trainer.loggers import read_metrics
from tensorshard.trainer.run import run
from tensorshard.trainer.run_directory import read_sessions
from tensorshard.weights.files.checkpoint_files import read_tensors


def _losses(folder: Path) -> dict[int, float]:
    return {int(line["step"]): line["loss"] for line in read_metrics(folder / "metrics.jsonl")}


def _in_memory(folder: Path, background: str) -> None:
    """A run, which is continued elsewhere after its newest checkpoint was damaged."""
    place = f"memory://{folder.name}/run"
    config = folder / "small.py"
    config.write_text(CONFIG)

    def train(name: str, *overrides: str, resume: str | None = None) -> dict[int, float]:
        given = [f"train.save_in_background={background}", "train.keep_checkpoints=2", *overrides]
        run(load_config(config, given, allow=["test_trainer_run"]), resume=resume, output=str(folder / name))
        return _losses(folder / name)

    undisturbed = train("undisturbed")
    best = "train.save_best=lowest val_error"
    assert train("run", f"train.checkpoint_dir={place}", best) == undisturbed
    files = fsspec.filesystem("memory")
    assert sorted(entry.rpartition("/")[2] for entry in files.ls(place, detail=False)) == ["best", "step-10", "step-8"]
    assert not (folder / "run" / "checkpoints").exists() and is_whole(f"{place}/best")
    with pytest.raises(ConfigError, match=r"memory.*holds later checkpoints \(steps 8, 10\); give another train"):
        train("another", f"train.checkpoint_dir={place}")
    tensors = next(name for name in files.find(f"{place}/step-10") if name.endswith("tensors-0.bin"))
    files.pipe_file(tensors, files.cat_file(tensors)[:-1])
    # As on a new machine: the store alone knows of the run.
    assert train("elsewhere", f"train.checkpoint_dir={place}", resume="latest") == {
        step: undisturbed[step] for step in (9, 10)
    }
    said = (folder / "elsewhere" / "rank0.log").read_text()
    assert "step-10 is damaged and is passed over" in said and "its manifest as manifest.json.damaged" in said
    assert read_sessions(folder / "elsewhere" / "sessions.jsonl")[0].first_step == 9
    assert len(files.find(f"{place}/step-10")) == 3 and is_whole(f"{place}/step-10")
    # One that the user names is continued in a folder.
    assert list(train("branch", "train.steps=12", resume=f"{place}/step-10")) == [11, 12]
    assert (folder / "branch" / "checkpoints" / "step-12").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("background", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_a_run_saves_to_a_store_and_goes_on_from_it(ranks: RankPool, tmp_path: Path, background: str) -> None:
    ranks(1, _in_memory, tmp_path, background)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.checkpoint_dir=nostore://bucket/run", r"train\.checkpoint_dir=nostore://bucket/run cannot be written"),
        ("train.output_dir=s3://bucket/run", r"train\.checkpoint_dir takes a URL"),
        ("train.checkpoint_dir=5", r"train\.checkpoint_dir is 5; expected a folder or a URL"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, said: str
) -> None:
    from tensorshard.trainer.settings import TrainSettings
    from tensorshard.trainer.start import find_start

    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart", [override])
    with pytest.raises(ConfigError, match=said):
        find_start(config, TrainSettings.from_config(config), None, None)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--output", "s3://bucket/run"], "set train.checkpoint_dir=s3://bucket/run"),
        (["--output", "here", "--resume", "memory://none/step-1"], "memory://none/step-1: there is no such checkpoint"),
    ],
)
def test_the_command_refuses_it_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], option: list[str], said: str
) -> None:
    assert cli.main(["train", "quickstart", *option]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of S3 on this machine, with an empty bucket, which other processes reach, too."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        port = next(found[1] for line in server.stderr if (found := re.search(r"127\.0\.0\.1:(\d+)", line)))
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }.items():
            monkeypatch.setenv(name, value)
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        files.mkdir("bucket")
        yield files
    finally:
        server.kill()
        server.wait()


def _command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TENSORSHARD_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "tensorshard.cli", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_commands_with_a_server_of_s3(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.py").write_text(CONFIG)
    place = "s3://bucket/run"
    train = ["train", "small.py", "--allow", "test_trainer_run", "--nproc", "2", f"train.checkpoint_dir={place}"]
    ended = _command(tmp_path, *train, "train.steps=6")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ended = _command(tmp_path, *train, "--resume")
    assert ended.returncode == 0 and "steps 7 to 10" in ended.stdout, ended.stdout + ended.stderr
    ended = _command(tmp_path, "export", f"{place}/step-10", "s3://bucket/weights")
    assert ended.returncode == 0, ended.stderr
    monkeypatch.setenv("TENSORSHARD_CACHE", str(tmp_path / "cache"))
    expected = read_tensors(f"{place}/step-10", "model.")
    for source in (f"{place}/step-10", "s3://bucket/weights"):
        state = ts.from_pretrained(source, SmallNet)().state_dict()
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
