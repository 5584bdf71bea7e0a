"""``metrics.jsonl``: one JSON object a line, for programs to read."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from tensorshard.trainer.loggers.logger import Logger


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
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
