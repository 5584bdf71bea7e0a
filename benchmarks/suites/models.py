"""Small models of many libraries under every plan, each compared with one plain process."""

import argparse
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from queue import Empty, SimpleQueue

from rich.console import Console

from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.models_cells import BrokenCaseError, Cell, CellRunner, installed
from benchmarks.harness.models_results import FamilyResults, load_family, source_revision
from benchmarks.harness.report import make_console
from benchmarks.models.case import Case
from benchmarks.models.plans import PLANS, PlanCase
from benchmarks.models.registry import FAMILIES, PACKAGES, STOCK, find_cases
from benchmarks.registry import Suite, positive_int

_LIBRARIES = ["torch", "tensorshard", "transformers", "timm", "torchvision", "diffusers"]
_COLORS = {"exact": "green", "refused": "yellow", "crashed": "red", "wrong": "bold red", "hung": "bold red"}


def select_cases(cases: Sequence[Case], patterns: Sequence[str], families: Sequence[str]) -> list[Case]:
    """The cases of `families` whose name or key matches one of `patterns`, globs in which case does not count.

    Raises:
        ValueError: a pattern matches none.
    """
    of_families = [case for case in cases if not families or case.family in families]
    for pattern in patterns:
        if not any(_matches(case, pattern) for case in of_families):
            raise ValueError(f"no model is called {pattern!r}; `--list` prints all of them")
    return [case for case in of_families if not patterns or any(_matches(case, pattern) for pattern in patterns)]


def _matches(case: Case, pattern: str) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for name in (case.name, case.key))


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    families = [PACKAGES] if arguments.packages else arguments.family or STOCK
    try:
        chosen = select_cases(list(find_cases().values()), arguments.models, families)
    except ValueError as error:
        console.print(f"error: {error}")
        return 2
    if arguments.list:
        for case in chosen:
            console.print(case.key, highlight=False)
        return 0
    cases = installed(chosen)
    for needed in sorted({case.needs or case.family for case in chosen if case not in cases}):
        console.print(f"{needed} is not installed: its models are left out", style="yellow")
    plans = [PLANS[key] for key in arguments.plan or PLANS]
    results = {family: load_family(family) for family in FAMILIES}
    revision = source_revision()
    todo: list[tuple[Case, list[PlanCase]]] = []
    for case in cases:
        left = [
            p
            for p in plans
            if p.suits(case) and (arguments.again or not results[case.family].is_done(case.name, p.key, revision))
        ]
        todo += [(case, left)] if left else []
    count = sum(len(left) for _, left in todo)
    console.print(f"{len(cases)} models, {len(plans)} plans; {count} cells to run at revision {revision}")
    statuses = _run_all(console, todo, results, revision, arguments)
    console.print(", ".join(f"{number} {status}" for status, number in statuses.most_common()) or "nothing to do")
    return 1 if statuses["broken"] else 0


def _run_all(
    console: Console,
    todo: Sequence[tuple[Case, list[PlanCase]]],
    results: dict[str, FamilyResults],
    revision: str,
    arguments: argparse.Namespace,
) -> Counter[str]:
    """Runs the cells, case by case, in `arguments.jobs` threads that each wait for processes of their own."""
    queue: SimpleQueue[tuple[Case, list[PlanCase]]] = SimpleQueue()
    for one in todo:
        queue.put(one)
    statuses: Counter[str] = Counter()
    lock = threading.Lock()

    def work(folder: Path) -> None:
        runner = CellRunner(folder, arguments.limit)
        while True:
            try:
                case, plans = queue.get_nowait()
            except Empty:
                return
            for plan in plans:
                start = time.monotonic()
                try:
                    cell = runner.run(case, plan)
                except BrokenCaseError as error:
                    with lock:
                        statuses["broken"] += len(plans)
                        console.print(f"{error}", style="bold magenta", highlight=False)
                    break
                with lock:
                    family = results[case.family]
                    family.versions |= installed_versions([case.group] if case.family == PACKAGES else _LIBRARIES)
                    family.date = date.today().isoformat()
                    family.add(case.name, plan.key, revision, cell)
                    family.save()
                    statuses[cell.status] += 1
                    _print(console, case, plan, cell, time.monotonic() - start)

    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor")
        threads = []
        for job in range(arguments.jobs):
            subfolder = Path(folder) / str(job)
            subfolder.mkdir()
            threads.append(threading.Thread(target=work, args=(subfolder,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return statuses


def _print(console: Console, case: Case, plan: PlanCase, cell: Cell, seconds: float) -> None:
    def described(one: Cell) -> str:
        share = "" if one.split_share is None else f" {one.split_share:.0%}"
        return f"[{_COLORS[one.status]}]{one.status}[/]{share}"

    line = f"{case.key:<44} {plan.key:<9} {described(cell)} ({seconds:.0f} s)"
    if cell.with_samples is not None:
        line += f", with sample inputs {described(cell.with_samples)}"
    console.print(line, highlight=False)
    for one in (cell, cell.with_samples):
        if one is not None and one.detail:
            console.print(f"    {one.stage} {one.where} {one.detail}", style="dim", highlight=False, markup=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", help="globs of names, such as 'gpt*' or 'timm/*'; all by default")
    parser.add_argument("--packages", action="store_true", help="models of other people's packages instead")
    parser.add_argument("--family", choices=FAMILIES, nargs="+", help="these libraries instead of all")
    parser.add_argument("--plan", choices=list(PLANS), nargs="+", help="these plans instead of all")
    parser.add_argument("--jobs", type=positive_int, default=1, help="cells at a time (default %(default)s)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a cell may take (default %(default)s)")
    parser.add_argument("--again", action="store_true", help="run cells that are done for these sources, too")
    parser.add_argument("--list", action="store_true", help="print the models' names and end")


SUITE = Suite(
    "models",
    "more than a hundred small models under every plan, each compared with one plain process",
    add_arguments,
    run,
)
