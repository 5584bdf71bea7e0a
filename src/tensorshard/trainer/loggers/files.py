"""Loggers that write files: one line of JSON a step, and each rank's log.

Also here: the base class of all loggers.
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO

from tensorshard.common.paths import write_whole


class Logger:
    """Takes the measurements of training steps. It exists on the rank that writes, usually rank 0 alone."""

    def start(self, step: int, max_steps: int) -> None:
        """Called when training begins, after `step` of `max_steps` steps."""

    def step_done(self, step: int) -> None:
        """Called after every step, also after those that are not logged."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the measurements of step `step`, by name."""

    def failed(self, error: Exception) -> None:
        """Called if training ends with `error`, before :meth:`close`."""

    def close(self) -> None:
        """Called last."""


class JsonLinesLogger(Logger):
    """Appends a line a logged step, with the key ``step`` first, and flushes it.

    A resumed run continues the file. Lines of later steps than the one from which it resumes are dropped, and so
    is a last line that a crash cut short. So each step appears once. Numbers that JSON cannot express become null.

    Args:
        path: the file; made at the start of training, if it is not there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def start(self, step: int, max_steps: int) -> None:
        if self.path.exists():
            _keep_until(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._file is None:
            raise RuntimeError("JsonLinesLogger.log() came before start(), which opens the file.")
        line = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The whole lines of a ``metrics.jsonl``, in order; an unfinished last line is left out."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _keep_until(path: Path, step: int) -> None:
    """Drops the lines of later steps. The file is replaced whole: no crash can lose the earlier ones."""
    lines = [line for line in read_metrics(path) if line["step"] <= step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


class RankLog:
    """While open, what is logged to "tensorshard" also goes to this rank's file. A context manager.

    Args:
        directory: the run's directory. It is made if it is not there, as on another machine with its own disks.
        rank: this process's global rank.
        console: a further handler, for what a person should see at once; only rank 0 has one.
    """

    def __init__(self, directory: str | Path, rank: int, console: logging.Handler | None = None) -> None:
        self.path = Path(directory) / f"rank{rank}.log"
        self._handlers: list[logging.Handler] = [] if console is None else [console]

    def __enter__(self) -> "RankLog":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        to_file = logging.FileHandler(self.path, encoding="utf-8")
        to_file.setFormatter(logging.Formatter(_FORMAT))
        self._handlers.append(to_file)
        logger = logging.getLogger("tensorshard")
        self._level, self._propagate = logger.level, logger.propagate
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        for handler in self._handlers:
            logger.addHandler(handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        logger = logging.getLogger("tensorshard")
        if error is not None:
            logger.debug("the run ended with an error", exc_info=error)
        for handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
        self._handlers.clear()
        logger.setLevel(self._level)
        logger.propagate = self._propagate
