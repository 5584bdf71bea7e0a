"""Reads the files that a run has written so far. It runs nothing, and changes nothing.

Also here: one measurement over the steps of a run, and its summary for a chart with fewer columns than steps.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tensorshard.config import ConfigError
from tensorshard.plan.plan import Plan
from tensorshard.trainer.run_directory import RUNS, RunDirectory, Session, read_sessions

MOST_RUNS = 8
"""The most runs in one report: there are only so many colours that are easy to tell apart."""

_RANK_PEAK = re.compile(r"peak_memory_bytes/rank(\d+)")
_LATER_CONFIG = re.compile(r"config-from-step-(\d+)\.yaml")
_SHOWN = 8  # the most folders that an error names


@dataclass(frozen=True)
class Series:
    """Numbers by step.

    Args:
        steps: [n], ascending.
        values: [n], all finite.
        dropped: how many further values were not finite.
    """

    steps: np.ndarray
    values: np.ndarray
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def first(self) -> float:
        return float(self.values[0])

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def median(self) -> float:
        """The median of all values but the first, which belongs to a step that allocates, and perhaps compiles."""
        return float(np.median(self.values[1:] if len(self) > 1 else self.values))

    def lowest(self) -> tuple[int, float]:
        """The step of the lowest value, and the value."""
        at = int(self.values.argmin())
        return int(self.steps[at]), float(self.values[at])

    def highest(self) -> tuple[int, float]:
        """The step of the highest value, and the value."""
        at = int(self.values.argmax())
        return int(self.steps[at]), float(self.values[at])


@dataclass(frozen=True)
class Columns:
    """The values of a series in each column of a chart. Columns without values are left out.

    Args:
        places: [n], the number of each column.
        lows, means, highs: [n], the lowest, the mean and the highest value there.
    """

    places: np.ndarray
    lows: np.ndarray
    means: np.ndarray
    highs: np.ndarray


def columns(series: Series, count: int, first: int, last: int) -> Columns:
    """`series` in `count` columns, which are the same for every series of a chart.

    No minimum and no maximum is lost, however many steps there are.

    Args:
        first, last: the steps at the left and the right end.
    """
    places = (series.steps - first) * count // (max(last - first, 0) + 1)
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    sizes = np.diff(starts, append=len(series))
    return Columns(
        places[starts],
        np.minimum.reduceat(series.values, starts),
        np.add.reduceat(series.values, starts) / sizes,
        np.maximum.reduceat(series.values, starts),
    )


@dataclass(frozen=True)
class Run:
    """A run, finished or not, with what it has written so far.

    Args:
        name: its name in the report, which tells it apart from the other runs.
        path: its directory.
        metrics: its metrics over the steps, by name.
        sessions: its starts in order; none for runs of versions that did not write them.
        config: its newest config, with references unresolved; {} without one.
        idle_seconds: seconds since it last wrote a line; None before the first line.
        unread: the number of lines in metrics.jsonl that are not measurements of a step.
    """

    name: str
    path: Path
    metrics: dict[str, Series]
    sessions: list[Session] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    idle_seconds: float | None = None
    unread: int = 0

    @property
    def last_step(self) -> int:
        """The last step that was logged, 0 before the first one."""
        return max((int(series.steps[-1]) for series in self.metrics.values()), default=0)

    @property
    def steps(self) -> int | None:
        """How many steps the run will have in all; None if that is not known."""
        if self.sessions:
            return self.sessions[-1].steps
        train = self.config.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        return steps if isinstance(steps, int) else None

    @property
    def session(self) -> Session | None:
        """The last start."""
        return self.sessions[-1] if self.sessions else None

    @cached_property
    def plan(self) -> Plan | None:
        """The plan of the last start, with every axis set; None if it is not known."""
        if self.session is None:
            return None
        try:
            return Plan.from_dict(self.session.plan).resolve(self.session.world_size)
        except (TypeError, ValueError):  # written by another version
            return None

    @property
    def peaks(self) -> list[int]:
        """The peak memory of each rank in bytes since the last start, by rank; [] if nothing was measured."""
        first = 0 if self.session is None else self.session.first_step  # an earlier start may have had other ranks
        now = {name: series for name, series in self.metrics.items() if series.steps[-1] >= first}
        by_rank = {int(match[1]): series.last for name, series in now.items() if (match := _RANK_PEAK.match(name))}
        if "peak_memory_bytes" in now:
            by_rank.setdefault(0, now["peak_memory_bytes"].last)
        ranks = len(by_rank) if self.session is None else self.session.world_size
        return [int(by_rank[rank]) for rank in range(ranks) if rank in by_rank]

    @property
    def beyond_start(self) -> list[int]:
        """:attr:`peaks` without the bytes that were held before the model was built, which an estimate does not count;
        [] if these are not known."""
        at_start = [] if self.session is None else self.session.held_before_bytes
        return [peak - before for peak, before in zip(self.peaks, at_start, strict=False)]

    @property
    def estimated(self) -> list[int]:
        """The estimated peak of each rank in bytes of live tensors; [] without an estimate."""
        return [] if self.session is None else self.session.estimated_bytes or []

    @property
    def predicted(self) -> list[int]:
        """What :attr:`peaks` were predicted to be; [] without an estimate."""
        return [] if self.session is None else self.session.predicted_bytes or []

    @property
    def curves(self) -> dict[str, Series]:
        """The metrics without those of single ranks."""
        return {name: series for name, series in self.metrics.items() if not _RANK_PEAK.match(name)}


def read_runs(folders: Sequence[str]) -> list[Run]:
    """The runs in `folders`, in this order.

    Raises:
        ConfigError: there are no runs, too many, or the same one twice, or a folder is not a run's.
    """
    if not folders:
        raise ConfigError(f"report takes the folder of at least one run, and was given none{_those_there()}")
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"report shows at most {MOST_RUNS} runs side by side, and was given {len(folders)}")
    paths = [Path(folder) for folder in folders]
    resolved = [path.resolve() for path in paths]
    for number, path in enumerate(resolved):
        if path in resolved[:number]:
            raise ConfigError(f"{paths[number]} is given twice; give each run once")
    return [read_run(path, name) for path, name in zip(paths, _names(resolved), strict=True)]


def read_run(path: Path, name: str | None = None) -> Run:
    """The run in the folder `path`.

    Args:
        name: the run's name; None for the folder's name.

    Raises:
        ConfigError: the folder is not a run's; the error names folders that are.
    """
    directory = RunDirectory(path)
    if not path.is_dir() or not any(file.is_file() for file in (directory.metrics, directory.config)):
        raise ConfigError(_no_run(path))
    metrics: dict[str, Series] = {}
    idle, unread = None, 0
    try:
        if directory.metrics.is_file():
            metrics, unread = read_series(directory.metrics)
            idle = max(0.0, time.time() - directory.metrics.stat().st_mtime) if metrics else None
        sessions = read_sessions(directory.sessions)
        config = _newest_config(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return Run(name or path.resolve().name, path, metrics, sessions, config, idle, unread)


def read_series(path: Path) -> tuple[dict[str, Series], int]:
    """The measurements in a ``metrics.jsonl`` by name, and the number of lines that are not measurements.

    The last line may be incomplete; it is ignored and not counted. If a line goes back to an earlier step, the run was
    resumed there: earlier lines about that step and later ones no longer count.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()
    records, unread = _records(lines)
    taken: dict[str, tuple[list[int], list[float | None]]] = {}
    for record in _without_what_was_done_again(records):
        step = record["step"]
        for name, value in record.items():
            if name in taken:
                steps, values = taken[name]
                steps.append(step)
                values.append(value)
            elif name != "step":
                taken[name] = ([step], [value])
    measurements = {name: _series(*pair) for name, pair in taken.items()}
    return {name: series for name, series in measurements.items() if len(series)}, unread


def _records(lines: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The objects in `lines` that have a step, and the number of other lines."""
    try:
        parsed = json.loads(f"[{','.join(lines)}]")  # all at once, which takes half the time of one by one
    except ValueError:
        parsed = [_parsed(line) for line in lines]
    records = [record for record in parsed if isinstance(record, dict) and type(record.get("step")) is int]
    return records, len(lines) - len(records)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _without_what_was_done_again(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`records` in ascending order of steps, without those that a resumed run has repeated."""
    ascending: list[dict[str, Any]] = []
    for record in records:
        while ascending and ascending[-1]["step"] >= record["step"]:
            ascending.pop()
        ascending.append(record)
    return ascending


def _series(steps: list[int], values: list[float | None]) -> Series:
    numbers = np.array([value if isinstance(value, int | float) else np.nan for value in values], dtype=np.float64)
    finite = np.isfinite(numbers)
    return Series(np.array(steps, dtype=np.int64)[finite], numbers[finite], int((~finite).sum()))


def _newest_config(path: Path) -> dict[str, Any]:
    """The config with which the run was last resumed, else its first config. It is only read as data."""
    later = {int(match[1]): file for file in path.iterdir() if (match := _LATER_CONFIG.fullmatch(file.name))}
    file = later[max(later)] if later else RunDirectory(path).config
    values = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return values if isinstance(values, dict) else {}


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest last parts of `paths` that tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _no_run(path: Path) -> str:
    if not path.exists():
        return f"there is no folder {path}; report takes the folder of a run{_those_there()}"
    for parent in (path.parent, path.parent.parent):
        if RunDirectory(parent).config.is_file():
            return f"{path} is a part of a run; give the run's folder, {parent}"
    if path.is_dir() and (inside := _runs_in(path)):
        return f"{path} is no run, but holds some; give one or several of them: {inside}"
    kind = "holds no run (no metrics.jsonl and no config.yaml)" if path.is_dir() else "is a file"
    return f"{path} {kind}; report takes the folder of a run{_those_there()}"


def _those_there() -> str:
    inside = _runs_in(RUNS)
    return f"; those here: {inside}" if inside else ", which 'tensorshard train' writes, such as runs/quickstart-1"


def _runs_in(folder: Path) -> str:
    """The newest runs in `folder`, by their paths; "" if there is none."""
    runs = [entry for entry in folder.iterdir() if RunDirectory(entry).config.is_file()] if folder.is_dir() else []
    runs.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return ", ".join(map(str, runs[:_SHOWN])) + more
