"""Where a run writes: the layout of its directory.

Also here: what is known of a run before its first step, kept for a report: ``sessions.jsonl`` in the run's directory.
"""

import itertools
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensorshard.common.stores import open_store
from tensorshard.config.lazy import ConfigError

RUNS = Path("runs")
"""Parent of the directories of runs that were not given one."""

_CHECKPOINT = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run.

    ::

        config.yaml        the config, overridden; `tensorshard train <this file>` repeats the run
        metrics.jsonl      measurements, one JSON object a line
        sessions.jsonl     the plan, the ranks and the estimate of each start, one JSON object a line
        rank0.log, ...     one log file a rank
        stacks/            what each rank was doing when one of them kept the others waiting
        tensorboard/       event files, where TensorBoard is installed or asked for
        wandb/, wandb.id, mlflow.id    where train.loggers asks for them
        profile/           traces of the steps that train.profile names; memory.html of train.profile_memory
        checkpoints/       step-100, step-200, ..., and best; each is whole or absent. step-100.damaged: --resume
                           found it damaged

    Attributes:
        path: the directory.
        checkpoint_dir: where the checkpoints are, if not there: a folder, or a URL that fsspec knows. An object store
            has no rename: a checkpoint there is whole if it has its manifest, and what is set aside loses it.
    """

    path: Path
    checkpoint_dir: Path | str | None = None

    @classmethod
    def new(cls, parent: str | Path, name: str, checkpoint_dir: Path | str | None = None) -> "RunDirectory":
        """Makes ``<parent>/<name>-<n>`` with the first free `n`, counting from 1."""
        for n in itertools.count(1):
            path = Path(parent) / f"{name}-{n}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            return cls(path, checkpoint_dir)
        raise AssertionError("unreachable: there is always a free number")

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def sessions(self) -> Path:
        return self.path / "sessions.jsonl"

    @property
    def stacks(self) -> Path:
        return self.path / "stacks"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path | str:
        """The folder of the checkpoints, or its URL."""
        return self.path / "checkpoints" if self.checkpoint_dir is None else self.checkpoint_dir

    def checkpoint(self, step: int) -> Path | str:
        """Where the checkpoint after `step` steps is or will be."""
        return _within(self.checkpoints, f"step-{step}")

    @property
    def best_checkpoint(self) -> Path | str:
        return _within(self.checkpoints, "best")

    def step_of(self, checkpoint: Path | str) -> int | None:
        """After how many steps this run wrote `checkpoint`; None if the path is of no checkpoint of this run."""
        if isinstance(checkpoint, str) or isinstance(self.checkpoints, str):
            folder, _, name = str(checkpoint).rstrip("/").rpartition("/")
            is_here = folder == str(self.checkpoints).rstrip("/")
        else:
            is_here, name = checkpoint.resolve().parent == self.checkpoints.resolve(), checkpoint.name
        match = _CHECKPOINT.fullmatch(name) if is_here else None
        return int(match[1]) if match else None

    def checkpoint_steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first. They get their names, or manifests, only once they are whole."""
        matches = (_CHECKPOINT.fullmatch(name) for name in open_store(self.checkpoints).folders())
        steps = sorted(int(match[1]) for match in matches if match)
        if isinstance(self.checkpoints, str):  # where folders of saves that did not end look the same
            from tensorshard.checkpoint.destinations import is_written

            steps = [step for step in steps if is_written(str(self.checkpoint(step)))]
        return steps

    def newest_checkpoint(self) -> Path | str | None:
        """The checkpoint with the most steps of those whose files are all there, or None. No tensors are read."""
        from tensorshard.checkpoint.integrity import is_whole  # torch's distributed checkpoints take long to import

        paths = (self.checkpoint(step) for step in reversed(self.checkpoint_steps()))
        return next((path for path in paths if is_whole(path)), None)

    def set_aside_damaged(self) -> list[str]:
        """Renames the checkpoints after the newest whole one, so that a run can go on from that one and save again.

        Returns:
            A sentence for each, which names the file that is damaged and the new name.
        """
        from tensorshard.checkpoint.integrity import why_not_whole

        sentences = []
        newest = self.newest_checkpoint()
        for step in reversed(self.checkpoint_steps()):
            path = self.checkpoint(step)
            if newest is None or path == newest:
                break
            sentences.append(self.set_aside(path, str(why_not_whole(path))))
        return sentences

    def set_aside(self, path: Path | str, why: str) -> str:
        """Gives a damaged checkpoint of this run another name, under which it is not resumed from; says so.

        In an object store its manifest gets another name, without which the place counts as empty.
        """
        prefix = f"the checkpoint {path} is damaged and is passed over; it is kept as"
        if isinstance(path, str):
            from tensorshard.checkpoint.destinations import withdraw

            return f"{prefix} it is, until the run saves there, its manifest as {withdraw(path)}: {why}"
        for number in itertools.count(1):
            aside = path.with_name(f"{path.name}.damaged" + (f"-{number}" if number > 1 else ""))
            if not aside.exists():
                break
        path.rename(aside)
        return f"{prefix} {aside.name}: {why}"

    def check_not_ahead(self, step: int) -> None:
        """Whether a run may go on here after `step` steps without overwriting later work.

        Raises:
            ConfigError: checkpoints of later steps are there.
        """
        later = [saved for saved in self.checkpoint_steps() if saved > step]
        if later:
            other = "directory (--output)" if self.checkpoint_dir is None else "train.checkpoint_dir"
            raise ConfigError(
                f"training begins after step {step}, but {self.checkpoint_dir or self.path} holds later checkpoints "
                f"(steps {', '.join(map(str, later))}); give another {other}, or delete those"
            )

    def delete_checkpoint(self, step: int) -> None:
        """Removes a checkpoint. It is renamed first, or loses its manifest, so that a partly deleted one is never taken
        for a whole one."""
        path = self.checkpoint(step)
        if isinstance(path, str):
            from tensorshard.checkpoint.destinations import remove

            remove(path)
            return
        doomed = path.with_name(f".deleting-{path.name}")
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def _within(folder: Path | str, name: str) -> Path | str:
    return f"{folder.rstrip('/')}/{name}" if isinstance(folder, str) else folder / name


@dataclass(frozen=True)
class Session:
    """One start of a run; a resumed run has several.

    Args:
        first_step: the first step that it takes.
        steps: how many the run is to have in all.
        world_size: the number of ranks.
        device: what they compute on, "cpu" or "cuda".
        plan: the fields of the resolved plan.
        held_before_bytes: what each rank held before the model was made, counted as the peak is.
        estimated_bytes: live tensors at the peak of each rank, as estimated; None without an estimate.
        predicted_bytes: each rank's peak, as predicted from that: counted as the peak is.
        estimated_step_seconds: of a step, as estimated; None where the speed of the hardware is not known.
        estimated_step_span: their low and high bound.
        times_are: what these seconds are worth, as :attr:`Hardware.basis`.
    """

    first_step: int
    steps: int
    world_size: int
    device: str
    plan: dict[str, Any]
    held_before_bytes: list[int]
    estimated_bytes: list[int] | None = None
    estimated_step_seconds: float | None = None
    predicted_bytes: list[int] | None = None
    estimated_step_span: list[float] | None = None
    times_are: str | None = None


def write_session(path: Path, session: Session) -> None:
    """Appends `session` to the file `path` as one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(session)) + "\n")


def read_sessions(path: Path) -> list[Session]:
    """What :func:`write_session` wrote, in order. An unfinished last line is left out. Empty without a file.

    Raises:
        ValueError: a line has other fields.
    """
    if not path.is_file():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    try:
        return [Session(**json.loads(line)) for line in lines]
    except TypeError as error:
        raise ValueError(f"{path} was written by another version of tensorshard ({error}); delete it") from error
