"""Where a run begins: in a new directory, or at a checkpoint of an earlier one."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig

from tensorshard.config import ConfigError, save_config, to_yaml
from tensorshard.trainer.launch.worker import RUN_FILE, is_restart
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
    checkpoint: Path | None
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
        resume: a checkpoint, ``"latest"``, or None to begin anew.
        output: the run's directory; wins over ``train.output_dir``.
        begun: where this run wrote before its workers were started again, see :func:`begun_anywhere`.

    Raises:
        ConfigError: the directory holds a run already, or there is nothing to resume from.
    """
    given = output or settings.output_dir
    directory = RunDirectory(Path(given)) if given else None
    begun = begun or (directory if is_restart() else None)
    if begun is not None and begun.path.is_dir():
        newest = begun.newest_checkpoint()
        return _started(begun, newest or (Path(resume) if resume not in (None, LATEST) else None))
    name = _run_name(config)
    if resume is None:
        if directory is None:
            with _written_to(RUNS):
                return Start(RunDirectory.new(RUNS, name), None)
        check_holds_no_run(directory.path)
        return _started(directory, None)
    if resume != LATEST:
        checkpoint = Path(resume)
        if not checkpoint.is_dir():
            raise ConfigError(f"there is no checkpoint {resume}")
        return _started(directory or _run_of(checkpoint), checkpoint, named=True)
    directory = directory or _run_of_config(Path(_asked_config(config))) or _newest_run(name)
    newest = directory.newest_checkpoint()
    if newest is None:
        raise ConfigError(_none_to_resume_from(directory))
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


def begun_anywhere(group: dist.ProcessGroup) -> RunDirectory | None:
    """Where workers wrote that are gone, if it was noted on any machine. A machine may be new, or have come back.

    A collective of `group`. Workers that are started again as a machine has joined count as no restart of the others.
    """
    file = Path(os.environ[RUN_FILE]) if RUN_FILE in os.environ else None
    own = file.read_text() if file is not None and file.is_file() else None
    everyone: list[str | None] = [own]
    if group.size() > 1:
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, own, group=group)
    noted = next((path for path in everyone if path is not None), None)
    return None if noted is None else RunDirectory(Path(noted))


def _none_to_resume_from(directory: RunDirectory) -> str:
    steps = directory.checkpoint_steps()
    if not steps:
        return f"{directory.path} holds no checkpoint to resume from; start anew without --resume"
    from tensorshard.checkpoint.integrity import why_not_whole

    why = why_not_whole(directory.checkpoint(steps[-1]))
    return f"{directory.path} holds no whole checkpoint to resume from; of {len(steps)}, the newest: {why}"


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


def _started(directory: RunDirectory, checkpoint: Path | None, *, named: bool = False) -> Start:
    with _written_to(directory.path):
        directory.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory.path):
            pass
    return Start(directory, checkpoint, named)


def _run_name(config: DictConfig) -> str:
    return str(config.train.name or Path(_asked_config(config)).stem)


def _asked_config(config: DictConfig) -> str:
    """The config file or name that the user gave; "run" where the config was made in Python."""
    return str(config.asked.config) if "asked" in config else "run"


def _run_of(checkpoint: Path) -> RunDirectory:
    """The run that wrote `checkpoint`, read from its path.

    Raises:
        ConfigError: the path is not that of a run's checkpoint.
    """
    if checkpoint.resolve().parent.name != "checkpoints":
        raise ConfigError(
            f"the checkpoint {checkpoint} is in no run's checkpoints directory, which would say where "
            f"to write; give a directory with --output"
        )
    return RunDirectory(checkpoint.parent.parent)


def _run_of_config(config: Path) -> RunDirectory | None:
    """The run that wrote the file `config`, if one did."""
    directory = RunDirectory(config.parent)
    return directory if config.name == directory.config.name and directory.checkpoint_steps() else None


def _newest_run(name: str) -> RunDirectory:
    """The run of that name with the highest number, of those with a checkpoint.

    Raises:
        ConfigError: there is none.
    """
    numbered = {}
    for path in RUNS.glob(f"{name}-*"):
        number = path.name.removeprefix(f"{name}-")
        if number.isdecimal() and RunDirectory(path).checkpoint_steps():
            numbered[int(number)] = path
    if not numbered:
        raise ConfigError(
            f"there is no run {RUNS / name}-<n> with a checkpoint here to resume; give the config.yaml "
            f"of a run, a checkpoint, or the run's directory with --output"
        )
    return RunDirectory(numbered[max(numbered)])
