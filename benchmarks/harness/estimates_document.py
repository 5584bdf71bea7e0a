"""The error table of estimates: on the terminal, in a results file, and in benchmarks/results/estimates.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.estimates import Outcome, summary_of
from benchmarks.harness.hardware import hardware_name, installed_versions
from benchmarks.harness.page_blocks import replace_block
from benchmarks.harness.results import RESULTS

PAGE = RESULTS / "estimates.md"
OTHERS = ("MemTracker", "DeepSpeed", "Accelerate")


@dataclass(frozen=True)
class EstimateResults:
    """The results of the benchmark's parts, each from its last run."""

    date: str
    versions: dict[str, str]
    outcomes: list[Outcome]
    resident: list[Outcome]

    @classmethod
    def load(cls, path: Path) -> "EstimateResults":
        """The results in the file; empty if there is no file."""
        if not path.exists():
            return cls("", {}, [], [])
        document = json.loads(path.read_text())
        parts = {part: [_outcome(one) for one in document[part]] for part in ("outcomes", "resident")}
        return cls(document["date"], document["versions"], **parts)


def _outcome(fields: dict[str, Any]) -> Outcome:
    by_rank = {name: {int(rank): size for rank, size in fields[name].items()} for name in ("estimated", "measured")}
    return Outcome(**{**fields, **by_rank})


def print_outcomes(console: Console, title: str, outcomes: Sequence[Outcome]) -> None:
    """Prints a row for each cell, and the median and the worst below them."""
    if not outcomes:
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("cell", overflow="fold")
    for head in ("estimated", "measured", "error", *OTHERS):
        table.add_column(head, justify="right", no_wrap=True)
    for outcome in outcomes:
        if outcome.failure:
            table.add_row(outcome.name, outcome.failure)
            continue
        rank = max(outcome.measured, key=outcome.measured.__getitem__)
        others = [f"{n / outcome.measured[rank] - 1:+.0%}" if (n := outcome.others.get(o)) else "" for o in OTHERS]
        sizes = [f"{size / 2**20:.2f}" for size in (outcome.estimated[rank], outcome.measured[rank])]
        table.add_row(outcome.name, *sizes, f"{outcome.error:+.2%}", *others)
    console.print(table)
    console.print("\n".join(_summary_lines(outcomes)))


def write_estimates(console: Console, outcomes: list[Outcome], resident: list[Outcome]) -> None:
    """Writes the parts that were run to the results file, and the block of the page."""
    folder = RESULTS / "estimate"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hardware_name('cpu')}.json"
    before = EstimateResults.load(path)
    results = EstimateResults(
        date.today().isoformat(),
        installed_versions(["torch", "tensorshard"]),
        outcomes or before.outcomes,
        resident or before.resident,
    )
    path.write_text(json.dumps(asdict(results), indent=1) + "\n")
    PAGE.write_text(replace_block(PAGE.read_text(), "estimates", markdown(results)))
    console.print(f"Written to {path} and {PAGE}")


def markdown(results: EstimateResults) -> str:
    """The summary of both tables, and other tools' estimates for the same runs."""
    lines = ["| | cells | median error | worst | most below |", "| --- | ---: | ---: | ---: | ---: |"]
    for title, outcomes in (("live tensors", results.outcomes), ("resident memory", results.resident)):
        errors = [outcome.error for outcome in outcomes if not outcome.failure]
        if errors:
            summary = summary_of(errors)
            lines.append(f"| tensorshard, {title} | {len(errors)} | {_percent(summary)} |")
    for other in OTHERS:
        errors = [
            outcome.others[other] / max(outcome.measured.values()) - 1
            for outcome in results.outcomes
            if other in outcome.others and not outcome.failure
        ]
        if errors:
            lines.append(f"| {other}, live tensors | {len(errors)} | {_percent(summary_of(errors))} |")
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    failed = [f"- not compared: {o.name}: {o.failure}" for o in results.outcomes if o.failure]
    return "\n".join(
        [*lines, "", f"{hardware_name('cpu')}, {results.date}; {versions}.", *([""] if failed else []), *failed]
    )


def _percent(summary: Mapping[str, float]) -> str:
    return " | ".join(f"{summary[key]:.1%}" for key in ("median", "worst", "under"))


def _summary_lines(outcomes: Sequence[Outcome]) -> list[str]:
    errors = [outcome.error for outcome in outcomes if not outcome.failure]
    if not errors:
        return ["nothing could be compared"]
    summary = summary_of(errors)
    figures = f"median {summary['median']:.2%}, worst {summary['worst']:.2%}, at most {summary['under']:.2%} below"
    return [f"{len(errors)} cells: {figures}"]
