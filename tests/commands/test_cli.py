"""The command line: what it understands, and what it refuses before anything is started."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import tensorshard
from tensorshard import cli
from tensorshard.commands import train
from tensorshard.trainer.launch.launch_errors import LaunchInterrupted, WorkerFailedError
from tensorshard.trainer.launch.launcher import World

_CONFIG = """
from tensorshard.config import LazyCall, get_config

train = get_config("common/train.py").train
train.steps = 7
train.global_batch_size = 4
model = loss = optimizer = scheduler = LazyCall(dict)()
data = dict(train=None, validation=None)
"""


class Started:
    """What the command would have started."""

    def __init__(self) -> None:
        self.config: DictConfig | None = None
        self.resume: str | None = None
        self.output: str | None = None
        self.timeout: float | None = None
        self.world: World | None = None
        self.log_dir: str | None = None
        self.expected: list[int] | None = None
        self.inside = False

    def launch(self, entrypoint: Any, args: tuple[Any, ...], world: World, *, log_dir: str | None, ending: Any) -> None:
        assert entrypoint is train.train_worker and callable(ending)
        self.config, self.resume, self.output, self.timeout, self.expected, self.request, _ = args
        self.world, self.log_dir = world, log_dir

    def run_worker(self, entrypoint: Any, args: tuple[Any, ...], *, report: bool) -> None:
        assert entrypoint is train.train_worker and report
        self.config, self.resume, self.output, self.timeout, self.expected, self.request, _ = args
        self.inside = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr("tensorshard.trainer.launch.launcher.launch", started.launch)
    monkeypatch.setattr("tensorshard.trainer.launch.launcher.visible_gpus", lambda: 0)
    monkeypatch.setattr(train, "run_worker", started.run_worker)
    monkeypatch.setattr("tensorshard.trainer.estimated_run.estimate_first", lambda *_, **__: ([7], ["so much"]))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return started


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(_CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "mine.py"


def test_without_arguments_it_is_the_quickstart_on_two_processes(started: Started) -> None:
    assert cli.main(["train"]) == 0
    assert started.config is not None
    assert started.config.asked == {"config": "quickstart", "overrides": []}
    assert started.world == World(nproc=2)
    assert (started.resume, started.output, started.log_dir, started.inside) == (None, None, None, False)


def test_every_visible_gpu_is_used(started: Started, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorshard.trainer.launch.launcher.visible_gpus", lambda: 4)
    assert cli.main(["train", config]) == 0
    assert started.world == World(nproc=4)


@pytest.mark.parametrize(
    "words",
    [
        ["mine.py", "train.steps=5", "train.plan.zero=1", "--nproc", "4", "--output", "out"],
        ["--nproc", "4", "mine.py", "train.steps=5", "--output", "out", "train.plan.zero=1"],
        ["train.steps=5", "--output=out", "train.plan.zero=1", "--nproc=4", "mine.py"],
    ],
)
def test_options_and_overrides_mix_in_any_order(started: Started, config: str, words: list[str]) -> None:
    assert cli.main(["train", *words]) == 0
    assert started.config is not None
    assert (started.config.train.steps, started.config.train.plan.zero) == (5, 1)
    overrides, options = ["train.steps=5", "train.plan.zero=1"], ["--nproc", "4"]
    assert started.config.asked == {"config": "mine.py", "overrides": overrides, "options": options}
    assert (started.world, started.output) == (World(nproc=4), "out")


def test_several_machines(started: Started, config: str) -> None:
    options = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "node0:29500", "--log-dir", "logs"]
    assert cli.main(["train", config, "--nproc", "2", *options]) == 0
    assert started.world == World(nproc=2, nnodes=2, node_rank=1, rdzv_endpoint="node0:29500")
    assert started.log_dir == "logs"


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        (["--resume"], "latest"),
        (["--resume", "train.steps=5"], "latest"),
        (["--resume", "mine.py"], "latest"),
        (["--resume", "step-50"], "step-50"),
        (["mine.py", "--resume", "step-50", "train.steps=5"], "step-50"),
    ],
)
def test_resume_takes_a_checkpoint_or_nothing(
    started: Started, config: str, words: list[str], resume: str, tmp_path: Path
) -> None:
    (tmp_path / "step-50").mkdir()
    assert cli.main(["train", *words]) == 0
    assert started.resume == resume
    assert started.config is not None
    assert started.config.asked.config == ("mine.py" if "mine.py" in words else "quickstart")
    assert list(started.config.asked.overrides) == [word for word in words if "=" in word]


def test_under_a_launcher_the_command_is_a_worker(
    started: Started, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["train", config, "train.plan.dp_shard=4"]) == 0
    assert started.inside and started.world is None


def test_under_a_launcher_processes_are_not_started_again(
    started: Started, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["train", config, "--nproc", "4"]) == 2
    assert "--nproc is for starting processes, but a launcher has started this one" in capsys.readouterr().err
    assert started.config is None


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.usefixtures("started")
def test_under_a_launcher_a_mistake_is_printed_once_and_handed_on(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    assert cli.main(["train", "no_such_config"]) == 2
    message = json.loads(error_file.read_text())["message"]
    assert message.startswith("there is no config 'no_such_config'")
    assert capsys.readouterr().err == (f"tensorshard: error: {message}\n" if rank == "0" else "")


def test_print_config_starts_nothing(started: Started, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", config, "train.steps=5", "--print-config"]) == 0
    text = capsys.readouterr().out
    assert "  steps: 5\n" in text
    assert "asked" not in text
    assert started.config is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_config"], "there is no config 'no_such_config'"),
        (["gpt", "data.train.source=x"], "data.validation.source has no value, which tensorshard.data.TokenDataset"),
        (["gpt"], "give it one: data.train.source=VALUE; `tensorshard data tokenize TEXT...` makes token files"),
        (["mine.py", "other.py"], "one config at a time, not mine.py and other.py"),
        (["mine.py", "train.stpes=3"], "did you mean 'steps'?"),
        (["mine.py", "train.plan.dp_shrad=3"], "did you mean 'dp_shard'?"),
        (["mine.py", "train.plan.dp_shard=3"], "train.plan: the plan's degrees (dp_shard=3) multiply to 3"),
        (["mine.py", "train.plan.zero=4"], "train.plan: zero is 4"),
        (["mine.py", "train.plan.pp=2"], "train.plan: the 1f1b schedule on 2 ranks needs at least micro_batches=2"),
        (["mine.py", "train.plan.micro_batches=3"], "train.global_batch_size 4 does not divide by"),
        (["mine.py", "--nproc", "0"], "nproc is 0; at least 1 process is needed"),
        (["mine.py", "--nproc", "-1"], "nproc is -1"),
        (["mine.py", "--nnodes", "2"], "give rdzv_endpoint the HOST:PORT"),
        (["mine.py", "--resume", "nowhere"], "--resume nowhere: there is no such checkpoint directory"),
        (["mine.py", "--output", "mine.py"], "--output mine.py: that is a file"),
    ],
)
def test_a_mistake_costs_one_sentence(
    started: Started, config: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tensorshard: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert started.config is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--nprocs", "2"], "unknown option --nprocs; did you mean --nproc?"),
        (["train", "--zzz"], "unknown option --zzz\n"),
        (["train", "--nproc", "two"], "invalid int value: 'two'"),
        (["trian"], "invalid choice: 'trian'"),
        (["env", "all"], "unexpected 'all'; this command takes no arguments"),
        (["test", "--nproc", "2", "tp"], "unexpected 'tp'"),
    ],
)
def test_unknown_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (LaunchInterrupted(signal.SIGTERM), 143, ""),
        (KeyboardInterrupt(), 130, ""),
        (
            WorkerFailedError({1: ProcessFailure(1, 1, 3, "")}, 2, None),
            1,
            "tensorshard: rank 1 of 2 ended with exit code 3 and no Python exception\n",
        ),
    ],
)
@pytest.mark.usefixtures("started", "config")
def test_how_a_run_ends_is_the_exit_code(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def launch(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("tensorshard.trainer.launch.launcher.launch", launch)
    assert cli.main(["train", "mine.py"]) == code
    assert capsys.readouterr().err == message


def test_modules_in_the_current_directory_can_be_imported(started: Started, config: str, tmp_path: Path) -> None:
    (tmp_path / "my_model_of_test_cli.py").write_text("class Net: ...\n")
    path = tmp_path / config
    path.write_text("from my_model_of_test_cli import Net\n" + path.read_text() + "model = LazyCall(Net)()\n")
    assert cli.main(["train", config]) == 0
    assert started.config is not None
    assert started.config.model._target_ == "my_model_of_test_cli.Net"


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "tensorshard train [CONFIG] [KEY=VALUE ...] [options]" in text
    assert "tensorshard train quickstart train.steps=50" in text


def test_the_version_is_told_without_loading_torch() -> None:
    code = "import sys, tensorshard.cli as c\ntry: c.main(['--version'])\nfinally: print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == f"tensorshard {tensorshard.__version__}\nFalse\n"


def test_the_estimate_comes_first(started: Started, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", config, "--force", "--profile-memory"]) == 0
    assert started.expected == [7] and "estimated memory\nso much" in capsys.readouterr().out
    assert started.config is not None
    assert started.config.asked.options == ["--profile-memory", "--force"] and started.config.train.profile_memory


@pytest.mark.parametrize("words", [["--no-estimate"], ["train.estimate=false"]])
def test_the_estimate_can_be_left_out(started: Started, config: str, words: list[str]) -> None:
    assert cli.main(["train", config, *words]) == 0
    assert started.expected is None and started.config is not None and not started.config.train.estimate


def test_the_timeout_reaches_the_workers(started: Started, config: str) -> None:
    assert cli.main(["train", config, "--timeout", "20"]) == 0
    assert started.timeout == 20.0


@pytest.mark.parametrize("seconds", ["0", "-3"])
def test_a_timeout_that_is_none(
    started: Started, config: str, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    assert cli.main(["train", config, f"--timeout={seconds}"]) == 2
    assert f"--timeout {seconds}: it must be a number of seconds above 0" in capsys.readouterr().err
    assert started.config is None
