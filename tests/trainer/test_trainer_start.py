"""Where a run begins, and the settings that it begins with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from tensorshard.config import ConfigError, load_config
from tensorshard.trainer.launch.worker import RESTARTS
from tensorshard.trainer.report import resume_command
from tensorshard.trainer.run_directory import RunDirectory
from tensorshard.trainer.settings import TrainSettings
from tensorshard.trainer.start import Start, find_start, write_config
from whole_checkpoints import write_whole


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def _find(config: DictConfig, resume: str | None = None, output: str | None = None) -> Start:
    return find_start(config, TrainSettings.from_config(config), resume, output)


def _past_run(name: str, *steps: int) -> RunDirectory:
    """A run in the current directory that left checkpoints."""
    directory = RunDirectory(Path(name))
    directory.path.mkdir(parents=True)
    for step in steps:
        write_whole(directory.checkpoint(step))
    write_config(load_config("quickstart"), directory, step=0)
    return directory


def test_new_runs_are_numbered() -> None:
    config = load_config("quickstart")
    assert [_find(config).directory.path.as_posix() for _ in range(2)] == [
        "runs/quickstart-1",
        "runs/quickstart-2",
    ]
    assert _find(config).checkpoint is None
    named = load_config("quickstart", ["train.name=trial"])
    assert _find(named).directory.path == Path("runs/trial-1")


def test_a_directory_can_be_given_by_config_or_by_option() -> None:
    config = load_config("quickstart", ["train.output_dir=here"])
    assert _find(config).directory.path == Path("here")
    assert _find(config, output="there/deeper").directory.path == Path("there/deeper")
    assert Path("there/deeper").is_dir()


def test_a_run_is_never_begun_in_the_directory_of_another() -> None:
    _past_run("here")
    with pytest.raises(ConfigError, match="here holds a run already; continue it with --resume"):
        _find(load_config("quickstart"), output="here")


def test_the_written_config_repeats_the_run_under_its_name_in_a_new_directory() -> None:
    config = load_config("quickstart", ["train.steps=7", "train.output_dir=here"])
    directory = _find(config).directory
    write_config(config, directory, step=0)
    again = load_config(directory.config)
    assert again.train.steps == 7
    assert _find(again).directory.path == Path("runs/quickstart-1")
    assert OmegaConf.load("here/asked.yaml").overrides == ["train.steps=7", "train.output_dir=here"]


def test_a_resumed_run_with_another_config_writes_it_beside_the_first() -> None:
    directory = _past_run("runs/quickstart-1", 5)
    write_config(load_config(directory.config), directory, step=5)
    assert not list(directory.path.glob("config-from-*"))
    write_config(load_config(directory.config, ["train.steps=900"]), directory, step=5)
    assert load_config(directory.path / "config-from-step-5.yaml").train.steps == 900
    assert load_config(directory.config).train.steps != 900


def test_the_schedule_of_a_repeated_run_follows_its_number_of_steps() -> None:
    directory = _past_run("runs/quickstart-1", 5)
    for overrides, steps in (([], 500), (["train.steps=40"], 40)):
        assert load_config(directory.config, overrides).scheduler.total_steps == steps


def test_resume_takes_the_newest_whole_checkpoint() -> None:
    directory = _past_run("runs/quickstart-1", 9, 10, 100)
    (directory.path / "checkpoints" / ".deleting-step-200").mkdir()
    (directory.path / "checkpoints" / "step-300.tmp").mkdir()
    found = _find(load_config(directory.config), resume="latest")
    assert found == Start(directory, directory.checkpoint(100))


def test_resume_passes_over_what_is_not_whole_and_names_the_file() -> None:
    directory = _past_run("runs/quickstart-1", 9, 10, 100)
    (directory.checkpoint(100) / "manifest.json").unlink()
    engine_json = directory.checkpoint(10) / "engine.json"
    engine_json.write_bytes(engine_json.read_bytes()[:-1])
    found = _find(load_config(directory.config), resume="latest")
    assert found == Start(directory, directory.checkpoint(9))
    assert directory.checkpoint_steps() == [9, 10, 100]  # nothing is changed until the run starts
    newest, older = directory.set_aside_damaged()
    assert "step-100 is damaged" in newest and "manifest.json is missing" in newest
    assert "step-10 is damaged" in older and "engine.json is cut off" in older and "kept as step-10.damaged" in older
    assert directory.checkpoint_steps() == [9] and directory.set_aside_damaged() == []
    (directory.checkpoint(9) / "engine.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no whole checkpoint to resume from.*engine.json is missing"):
        _find(load_config(directory.config), resume="latest")


def test_resume_finds_the_newest_run_of_the_config() -> None:
    for number in (2, 10):
        _past_run(f"runs/quickstart-{number}", 5)
    _past_run("runs/quickstart-11")  # ended before its first checkpoint
    _past_run("runs/quickstart-test-12", 5)  # another config's
    assert _find(load_config("quickstart"), resume="latest").directory.path == Path("runs/quickstart-10")


def test_resume_from_a_given_checkpoint_continues_its_run_or_branches_off() -> None:
    directory = _past_run("runs/quickstart-1", 5)
    checkpoint = str(directory.checkpoint(5))
    found = _find(load_config("quickstart"), resume=checkpoint)
    assert found.directory == directory and found.named
    branch = _find(load_config("quickstart"), resume=checkpoint, output="branch")
    assert branch == Start(RunDirectory(Path("branch")), directory.checkpoint(5), named=True)


def test_resume_without_anything_to_resume_from_says_so() -> None:
    config = load_config("quickstart")
    with pytest.raises(ConfigError, match="there is no run runs/quickstart-<n> with a checkpoint"):
        _find(config, resume="latest")
    with pytest.raises(ConfigError, match="there is no checkpoint runs/x"):
        _find(config, resume="runs/x")
    with pytest.raises(ConfigError, match="empty holds no checkpoint"):
        _find(config, resume="latest", output="empty")
    Path("stray").mkdir()
    with pytest.raises(ConfigError, match=r"in no run's checkpoints directory.*--output"):
        _find(config, resume="stray")


def test_a_run_that_was_made_in_python_is_continued_by_its_own_config() -> None:
    directory = _past_run("runs/my run", 5)
    config = OmegaConf.create({"model": {"_target_": "mine.nets.Net"}, "loss": {"_target_": "torch.nn.MSELoss"}})
    words = "'runs/my run/config.yaml' --allow mine --output 'runs/my run' --resume"
    assert resume_command(config, directory) == f"tensorshard train {words}"


def test_settings_come_from_the_config() -> None:
    settings = TrainSettings.from_config(load_config("quickstart", ["train.plan.zero=os", "train.eval_batches=null"]))
    assert (settings.plan.zero, settings.plan.dp_shard, settings.eval_batches) == (1, -1, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "train.steps is 0; expected an integer of at least 1"),
        ({"steps": 1.5}, "train.steps is 1.5"),
        ({"seed": -1}, "train.seed is -1"),
        ({"eval_batches": 0}, "train.eval_batches is 0"),
        ({"log_evry": 5}, "no setting 'log_evry'; did you mean 'log_every'"),
        ({"plan": {"zero": 3}}, r"train.plan is a dict; expected LazyCall\(Plan\)"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any], message: str) -> None:
    config = load_config("quickstart")
    with open_dict(config):
        config.train.update(change)
    with pytest.raises(ConfigError, match=message):
        TrainSettings.from_config(config)


def test_missing_sections_and_settings_are_named() -> None:
    config = load_config("quickstart")
    del config.train.steps
    with pytest.raises(ConfigError, match=r"train.steps is missing; start from get_config\('common/train.py'\)"):
        TrainSettings.from_config(config)
    del config.loss
    config.scheduler = None
    with pytest.raises(
        ConfigError,
        match="the config has no scheduler and no loss; one that can be run has the sections model",
    ):
        TrainSettings.from_config(config)


def test_a_batch_that_cannot_be_cut_is_refused_with_the_nearest_that_can() -> None:
    config = load_config("quickstart", ["train.global_batch_size=32", "train.plan.micro_batches=2"])
    settings = TrainSettings.from_config(config)
    settings.check_batch(dp_size=4)
    with pytest.raises(ConfigError, match=r"32 does not divide by 3 data ranks x 2 micro-batches; .* is 30 or 36"):
        settings.check_batch(dp_size=3)
    with pytest.raises(ConfigError, match="the nearest that does is 80"):
        settings.check_batch(dp_size=40)


def test_a_checkpoint_that_the_user_named_stays_named_when_workers_are_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RESTARTS, "1")
    config, run, elsewhere = load_config("quickstart"), _past_run("here", 3, 6), _past_run("elsewhere")
    named = run.checkpoint(6)
    for output in (run, elsewhere):  # neither has a later one
        assert _find(config, str(named), str(output.path)) == Start(output, named, named=True)
    assert _find(config, str(run.checkpoint(3)), "here") == Start(run, named)  # saved since then
    (run.path / "checkpoints" / "step-6" / "engine.json").unlink()
    assert _find(config, str(named), "here") == Start(run, named, named=True)  # no older one takes its place
