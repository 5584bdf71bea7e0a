"""Where a run begins: in a new directory, or at a checkpoint of an earlier one."""

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig

from tensorshard.common.stores import local_or_url, open_store
from tensorshard.config import ConfigError, save_config, to_yaml
from tensorshard.trainer.launch.worker import RUN_FILE, is_restart, told
from tensorshard.trainer.run_directory import RUNS, RunDirectory
from tensorshard.trainer.settings import TrainSettings

LATEST = "latest"
"""In place of a checkpoint's path: the newest one of the run."""


@dataclass(frozen=True)
class Start:
    """Where a run writes, and what it continues.

    Attributes:
        directory: of the run; it exists.
        checkpoint: the one to load; None for a run that begins with step 1.
        named: whether the user named that checkpoint, so that no other one may take its place.
    """

    directory: RunDirectory
    checkpoint: Path | str | None
    named: bool = False


def find_start(
    config: DictConfig,
    settings: TrainSettings,
    resume: str | None,
    output: str | None,
    begun: RunDirectory | None = None,
) -> Start:
    """Finds or makes the directory of a run, and the checkpoint that it is to continue from.

    Nothing that is there is changed. One rank does this for all.

    Args:
        config: what :func:`tensorshard.config.load_config` returned.
        settings: its ``train`` section.
        resume: a checkpoint, a path or a URL; ``"latest"``; or None to begin anew.
        output: the run's directory; wins over ``train.output_dir``.
        begun: where this run wrote before its workers were started again, see :func:`begun_anywhere`.

    Raises:
        ConfigError: the directory holds a run already, or there is nothing to resume from.
    """
    given, place = output or settings.output_dir, settings.checkpoint_place
    directory = RunDirectory(Path(given), place) if given else None
    begun = begun or (directory if is_restart() else None)
    if begun is not None and begun.path.is_dir():
        return _started_again(RunDirectory(begun.path, place), None if resume == LATEST else resume)
    name = _run_name(config)
    if resume is None:
        if directory is None:
            with _written_to(RUNS):
                return _started(RunDirectory.new(RUNS, name, place), None)
        check_holds_no_run(directory.path)
        return _started(directory, None)
    if resume != LATEST:
        checkpoint = local_or_url(resume)
        if isinstance(checkpoint, Path) and not checkpoint.is_dir():
            raise ConfigError(f"there is no checkpoint {resume}")
        return _started(directory or _run_of(checkpoint, place), checkpoint, named=True)
    directory = directory or _run_of_config(Path(_asked_config(config)), place) or _newest_run(name, place)
    newest = directory.newest_checkpoint()
    if newest is None:
        raise ConfigError(_none_to_resume_from(directory))
    return _started(directory, newest)


def _started_again(directory: RunDirectory, resume: str | None) -> Start:
    """Where a run goes on whose workers were started again.

    That is its newest checkpoint; the one that the user named, `resume`, until there is a later one.
    """
    newest = directory.newest_checkpoint()
    named = None if resume is None else local_or_url(resume)
    if named is None or newest is None:
        return _started(directory, named if newest is None else newest, named=named is not None)
    steps = directory.step_of(named), directory.step_of(newest)
    if steps[0] is not None and steps[1] is not None and steps[1] <= steps[0]:
        return _started(directory, named, named=True)
    return _started(directory, newest)


def check_holds_no_run(path: str | Path) -> None:
    """Whether a new run may write to `path`.

    Raises:
        ConfigError: an earlier one did.
    """
    if RunDirectory(Path(path)).config.exists():
        raise ConfigError(f"{path} holds a run already; continue it with --resume, or give another directory")


def note_start(start: Start) -> None:
    """Tells workers that are started again, after one has failed, where this run writes."""
    if RUN_FILE in os.environ:
        Path(os.environ[RUN_FILE]).write_text(str(start.directory.path))


def note_end() -> None:
    """Tells this machine's launcher that the run has ended, or was stopped, and has said so."""
    if RUN_FILE in os.environ:
        told(Path(os.environ[RUN_FILE])).touch()


def begun_anywhere(group: dist.ProcessGroup) -> RunDirectory | None:
    """Where workers wrote that are gone, if it was noted on any machine. A machine may be new, or have come back.

    A collective of `group`. Workers that are started again as a machine has joined count as no restart of the others.
    """
    file = Path(os.environ[RUN_FILE]) if RUN_FILE in os.environ else None
    local_path = file.read_text() if file is not None and file.is_file() else None
    everyone: list[str | None] = [local_path]
    if group.size() > 1:
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, local_path, group=group)
    noted = next((path for path in everyone if path is not None), None)
    return None if noted is None else RunDirectory(Path(noted))


def _none_to_resume_from(directory: RunDirectory) -> str:
    steps, place = directory.checkpoint_steps(), directory.checkpoint_dir or directory.path
    if not steps:
        return f"{place} holds no checkpoint to resume from; start anew without --resume"
    from tensorshard.checkpoint.integrity import why_not_whole

    why = why_not_whole(directory.checkpoint(steps[-1]))
    return f"{place} holds no whole checkpoint to resume from; of {len(steps)}, the newest: {why}"


def write_config(config: DictConfig, directory: RunDirectory, step: int) -> None:
    """Writes ``config.yaml``; a resumed run with another config ``config-from-step-<step>.yaml``.

    It does not name the directory, so that ``tensorshard train config.yaml`` repeats the run in a new directory
    with the next number.
    """
    config = config.copy()
    config.train.output_dir = None
    config.train.name = _run_name(config)
    if not directory.config.exists():
        save_config(config, directory.config)
    elif to_yaml(config).encode() != directory.config.read_bytes():
        changed = directory.path / f"config-from-step-{step}.yaml"
        changed.write_text(to_yaml(config), encoding="utf-8")


@contextmanager
def _written_to(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the directory {path} cannot be written ({error}); give another with --output") from error


def _started(directory: RunDirectory, checkpoint: Path | str | None, *, named: bool = False) -> Start:
    with _written_to(directory.path):
        directory.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory.path):
            pass
    if directory.checkpoint_dir is not None:
        _check_writable(directory.checkpoint_dir)
    return Start(directory, checkpoint, named)


def _check_writable(place: Path | str) -> None:
    """Whether checkpoints can be written to `place`, which is found out before the first step.

    Raises:
        ConfigError: they cannot.
    """
    probe = f"writable-{uuid.uuid4().hex}"
    try:
        if isinstance(place, Path):
            place.mkdir(parents=True, exist_ok=True)
        store = open_store(place)
        store.write(probe, b"written by tensorshard train, to see whether it can save here\n")
        store.remove(probe)
    except (OSError, ImportError, ValueError) as error:
        raise ConfigError(f"train.checkpoint_dir={place} cannot be written: {type(error).__name__}: {error}") from error


def _run_name(config: DictConfig) -> str:
    return str(config.train.name or Path(_asked_config(config)).stem)


def _asked_config(config: DictConfig) -> str:
    """The config file or name that the user gave; "run" where the config was made in Python."""
    return str(config.asked.config) if "asked" in config else "run"


def _run_of(checkpoint: Path | str, place: Path | str | None) -> RunDirectory:
    """The run that wrote `checkpoint`, read from its path.

    Raises:
        ConfigError: the path is not that of a run's checkpoint.
    """
    if isinstance(checkpoint, str) or checkpoint.resolve().parent.name != "checkpoints":
        raise ConfigError(
            f"the checkpoint {checkpoint} is in no run's checkpoints directory, which would say where "
            f"to write; give a directory with --output"
        )
    return RunDirectory(checkpoint.parent.parent, place)


def _run_of_config(config: Path, place: Path | str | None) -> RunDirectory | None:
    """The run that wrote the file `config`, if one did."""
    directory = RunDirectory(config.parent, place)
    return directory if config.name == directory.config.name and directory.checkpoint_steps() else None


def _newest_run(name: str, place: Path | str | None) -> RunDirectory:
    """The run of that name with the highest number, of those with a checkpoint.

    Args:
        place: where all of them have their checkpoints, as ``train.checkpoint_dir`` says. A machine that has no such
            run gets a new directory if there are some.

    Raises:
        ConfigError: there is none.
    """
    numbered = {}
    for path in RUNS.glob(f"{name}-*"):
        number = path.name.removeprefix(f"{name}-")
        if number.isdecimal() and RunDirectory(path, place).checkpoint_steps():
            numbered[int(number)] = path
    if not numbered and place is not None and RunDirectory(RUNS, place).checkpoint_steps():
        return RunDirectory.new(RUNS, name, place)
    if not numbered:
        raise ConfigError(
            f"there is no run {RUNS / name}-<n> with a checkpoint here to resume; give the config.yaml "
            f"of a run, a checkpoint, or the run's directory with --output"
        )
    return RunDirectory(numbered[max(numbered)], place)
