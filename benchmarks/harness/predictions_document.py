"""The page of what ``tensorshard check`` has predicted and then measured on machines whose files were sent."""

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.page_blocks import replace_block
from benchmarks.harness.results import RESULTS
from tensorshard.common.words import seconds_words, size_text, span_words, speed_words
from tensorshard.predict.hardware import known_hardware

DOCUMENT = RESULTS / "predictions.md"
FILES = RESULTS / "predictions"
_HEAD = (
    "| device | ranks, plan | memory, predicted | measured | a step, predicted | measured | operations |",
    "|---|---|---:|---:|---:|---:|---:|",
)


def write_document() -> Path:
    """Writes the table of the page from the files; returns its path."""
    sent = [json.loads(path.read_text()) for path in sorted(FILES.glob("*.json"))]
    DOCUMENT.write_text(replace_block(DOCUMENT.read_text(), "predictions", "\n".join([*_HEAD, *rows(sent)])))
    return DOCUMENT


def rows(sent: list[dict[str, Any]]) -> list[str]:
    """The rows of the files `sent`, and an empty one for each GPU with a profile of which there is none."""
    lines = [_row(values, run) for values in sent for run in values["runs"] if run["measured"] is not None]
    there = {values["profile"] for values in sent}
    return lines + [f"| {name} | | | | | | |" for name in known_hardware() if name not in there]


def _row(values: dict[str, Any], run: dict[str, Any]) -> str:
    predicted, measured = run["predicted"], run["measured"]
    seconds = predicted["step_seconds"]
    cells = [
        f"{values['device']}, {values['date']}, torch {values['torch']}",
        f"{values['ranks']}, `{run['plan']}`",
        size_text(max(predicted["memory"])),
        size_text(max(measured["memory"])),
        "" if seconds is None else span_words(seconds, predicted["step_span"]),
        seconds_words(measured["step_seconds"]),
        speed_words(predicted["flops"] / measured["step_seconds"]),
    ]
    return f"| {' | '.join(cells)} |"
