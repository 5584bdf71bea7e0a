"""The results of the planner's benchmark: on the terminal, in a results file, and in benchmarks/results/planner.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.hardware import hardware_name, installed_versions
from benchmarks.harness.page_blocks import replace_block
from benchmarks.harness.planner_memory import MODEL, LimitedRun, MemoryRun
from benchmarks.harness.planner_memory import WORLD as MEMORY_WORLD
from benchmarks.harness.planner_runs import WORLD, ModelRuns, PlanRun
from benchmarks.harness.planner_scale import ScaleFinding
from benchmarks.harness.results import RESULTS

PAGE = RESULTS / "planner.md"
FILE = RESULTS / "planner" / f"{hardware_name('cpu')}.json"


@dataclass
class PlannerResults:
    """The results of the benchmark by model, each from its last run."""

    models: dict[str, ModelRuns]
    scales: dict[str, ScaleFinding]
    memory: dict[str, MemoryRun]

    @classmethod
    def load(cls, path: Path = FILE) -> "PlannerResults":
        """The results in the file; empty if there is no file."""
        if not path.exists():
            return cls({}, {}, {})
        content = json.loads(path.read_text())
        models = {
            name: ModelRuns(**{**one, "runs": [_plan_run(run) for run in one["runs"]]})
            for name, one in content["models"].items()
        }
        scales = {name: ScaleFinding(**one) for name, one in content["scales"].items()}
        return cls(models, scales, {size: _memory_run(one) for size, one in content["memory"].items()})


def _plan_run(values: Mapping[str, Any]) -> PlanRun:
    known = {field.name for field in fields(PlanRun)}  # older results have more
    return PlanRun(**{name: value for name, value in values.items() if name in known})


def _memory_run(values: Mapping[str, Any]) -> MemoryRun:
    runs = {name: LimitedRun(**values[name]) for name in ("within", "tight") if values[name] is not None}
    return MemoryRun(**{**values, **runs})


def write_planner(console: Console, results: PlannerResults) -> None:
    """Writes the results, and the blocks of the page."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "date": date.today().isoformat(),
        "versions": installed_versions(["torch", "tensorshard"]),
        "models": {name: asdict(one) for name, one in results.models.items()},
        "scales": {name: asdict(one) for name, one in results.scales.items()},
        "memory": {size: asdict(one) for size, one in results.memory.items()},
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    text = PAGE.read_text()
    for name, markdown in (("runs", markdown_runs), ("memory", markdown_memory), ("scale", markdown_scale)):
        text = replace_block(text, f"planner-{name}", markdown(results))
    PAGE.write_text(text)
    console.print(f"Written to {FILE} and {PAGE}")


def print_runs(console: Console, model_runs: ModelRuns) -> None:
    """Prints a row for each plan, the fastest first, and how good the choice is."""
    table = Table(title=f"{model_runs.model}, {WORLD} ranks", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("plan", overflow="fold")
    for head in ("busy", "wall", "predicted", "memory"):
        table.add_column(head, justify="right", no_wrap=True)
    for run in sorted(model_runs.runs, key=lambda run: run.busy or float("inf")):
        if run.refused:
            table.add_row(run.name, "refused", run.refused)
            continue
        seconds = [f"{value * 1e3:.0f} ms" for value in (run.busy, run.wall, run.predicted)]
        table.add_row(f"{run.name}{'  <- chosen' * run.chosen}", *seconds, f"{run.memory / 2**20:.0f} MiB")
    console.print(table)
    console.print(
        f"the choice takes "
        f"{model_runs.regret(wall=False):+.1%} busy seconds and "
        f"{model_runs.regret(wall=True):+.1%} wall time beside the best; searched for "
        f"{model_runs.search_seconds:.0f} s, {model_runs.estimated} estimates"
    )


def print_findings(console: Console, findings: Sequence[ScaleFinding]) -> None:
    """Prints a few lines for each finding."""
    for finding in findings:
        console.print(f"[bold]{finding.name}[/], {finding.machines}: {finding.plan}", highlight=False)
        console.print(f"  {_times(finding.seconds, finding.memory)}; {_search_words(finding)}", highlight=False)
        if finding.published is not None:
            words = f"  {finding.source}: {finding.published_plan}: {_times(*finding.published)} ({finding.why})"
            console.print(words, highlight=False)


def markdown_runs(results: PlannerResults) -> str:
    """A row for each model, and the median and the worst below them."""
    lines = [
        "| model | plans run | the choice | regret, CPU time | wall time | search |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for name, one in results.models.items():
        lines.append(
            f"| {name} | {len(one.valid)} | `{one.chosen.name}` "
            f"| {one.regret(wall=False):.1%} | {one.regret(wall=True):.1%} | {one.search_seconds:.0f} s |"
        )
    if results.models:
        for words, choose in (("median", median), ("worst", max)):
            regrets = [choose([one.regret(wall=wall) for one in results.models.values()]) for wall in (False, True)]
            lines.append(f"| **{words}** | | | {regrets[0]:.1%} | {regrets[1]:.1%} | |")
    return "\n".join([*lines, "", f"{hardware_name('cpu')}, {date.today().isoformat()}."])


def print_memory(console: Console, runs: Sequence[MemoryRun]) -> None:
    """Prints a line for each run."""
    for run in runs:
        console.print(f"{run.given >> 20} MiB a rank: {_memory_words(run)}", highlight=False)


def markdown_memory(results: PlannerResults) -> str:
    """A row for each size."""
    lines = [
        f"| given (a GPT of {MODEL.name} parameters, {MEMORY_WORLD} ranks) | plan | estimated, a rank | measured "
        "| measured, with no more than the estimate |",
        "| ---: | --- | ---: | ---: | ---: |",
    ]
    for run in results.memory.values():
        if run.within is None or run.tight is None:
            lines.append(f"| {run.given >> 20} MiB | {run.failure} | | | |")
            continue
        sizes = " | ".join(map(_limited_words, (run.within, run.tight)))
        lines.append(f"| {run.given >> 20} MiB | `{run.plan}` | {run.estimated >> 20} MiB | {sizes} |")
    return "\n".join(lines)


def _limited_words(run: LimitedRun) -> str:
    """Bytes of a rank, and how it ended if it was not at its end."""
    group = "" if run.limited else " (without a limit: no cgroup could be made)"
    ended = " **killed**" if run.killed else f" **failed**: {run.failure}" if run.failure else ""
    return f"{run.peak // MEMORY_WORLD >> 20} MiB{ended}{group}"


def _memory_words(run: MemoryRun) -> str:
    if run.within is None or run.tight is None:
        return run.failure
    return (
        f"{run.plan}: {run.estimated >> 20} MiB a rank estimated, {_limited_words(run.within)} measured, "
        f"{_limited_words(run.tight)} with no more than the estimate"
    )


def markdown_scale(results: PlannerResults) -> str:
    """A row for each large model, and one for the published plan below it."""
    lines = [
        "| model | machines | plan | a step | a rank | search |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for finding in results.scales.values():
        lines.append(
            f"| {finding.name} | {finding.machines} | `{finding.plan}` | {finding.seconds:.2f} s | "
            f"{finding.memory / 2**30:.1f} GiB | {finding.took:.0f} s, {finding.resident / 2**30:.1f} GiB |"
        )
        if finding.published is not None:
            seconds, memory = finding.published
            lines.append(
                f"| | {finding.source} | `{finding.published_plan}`: {finding.why} | {seconds:.2f} s | "
                f"{memory / 2**30:.1f} GiB | |"
            )
    return "\n".join(lines)


def _times(seconds: float, memory: int) -> str:
    return f"{seconds:.2f} s a step, {memory / 2**30:.1f} GiB a rank"


def _search_words(finding: ScaleFinding) -> str:
    return (
        f"{finding.considered} plans considered, {finding.estimated} estimated in {finding.took:.0f} s, "
        f"{finding.resident / 2**30:.1f} GiB resident"
    )
