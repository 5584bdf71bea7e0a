"""The numbers that this project's sources are known for, as estimates of ours on their hardware."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.headlines import BERT_REPORTED, HEADLINES, NOT_POSSIBLE, Finding, bert_bytes, find
from benchmarks.harness.report import make_console
from benchmarks.harness.results import RESULTS
from benchmarks.harness.zero_table import SIZES, StatesCell, states_table
from benchmarks.registry import Suite

_PARTS = ("zero", "bert", "models")
_MB = 1_000_000


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    parts = _PARTS if arguments.part is None else (arguments.part,)
    content: dict[str, object] = {"date": date.today().isoformat(), "versions": installed_versions(["torch"])}
    if "zero" in parts:
        with console.status("the table of the ZeRO paper"):
            cells = states_table(["7.5B"], [1, 64]) if arguments.quick else states_table()
        print_states(console, cells)
        content["zero"] = [asdict(cell) | {"paper": cell.paper, "formula": cell.formula} for cell in cells]
    if "bert" in parts:
        with console.status("BERT-Large over 1 to 16 ranks"):
            measured = bert_table([1, 2] if arguments.quick else list(BERT_REPORTED))
        print_bert(console, measured)
        content["bert"] = measured
    if "models" in parts and not arguments.quick:
        findings = []
        for headline in HEADLINES:
            with console.status(headline.name):
                findings.append(find(headline))
        print_findings(console, findings)
        content["models"] = [asdict(finding) for finding in findings]
    if arguments.part is None and not arguments.quick:
        path = RESULTS / "estimate" / "headlines.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        console.print(f"Written to {path}")
    return 0


def bert_table(ranks: Sequence[int]) -> dict[int, int]:
    """Bytes of BERT-Large by the number of ranks, with so many samples that one rank takes what was reported of it.

    Memory grows linearly with the samples of a rank: two numbers of them give a line.
    """
    one, three = bert_bytes(1, 1), bert_bytes(1, 3)
    a_sample = (three - one) / 2
    samples = max(1, round(1 + (BERT_REPORTED[1] * _MB - one) / a_sample))
    return {count: bert_bytes(count, samples) for count in ranks}


def print_states(console: Console, cells: Sequence[StatesCell]) -> None:
    table = _table(
        "GB of model states, as in the ZeRO paper's table 1", "devices", "model", "P_os", "P_os+g", "P_os+g+p"
    )
    for size in SIZES:
        for devices in sorted({cell.devices for cell in cells}):
            own = [cell for cell in cells if (cell.size, cell.devices) == (size, devices)]
            if own:
                table.add_row(
                    str(devices),
                    size,
                    *(f"{cell.gigabytes:.4g} ({cell.paper / cell.parameters * SIZES[size] / 1e9:.4g})" for cell in own),
                )
    console.print(table)
    worst = max(abs(cell.error) for cell in cells)
    console.print(f"in brackets: the paper's. Runs are at most {worst:.2%} off the formula of this package's states")


def print_bert(console: Console, measured: Mapping[int, int]) -> None:
    table = _table("BERT-Large, ZeRO 3, recompute full, bf16", "ranks", "reported", "of one", "estimated", "of one")
    for count, nbytes in measured.items():
        reported = BERT_REPORTED[count]
        shares = (f"{reported / BERT_REPORTED[1]:.2f}", f"{nbytes / measured[1]:.2f}")
        table.add_row(str(count), f"{reported} MB", shares[0], f"{nbytes / _MB:.0f} MB", shares[1])
    console.print(table)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    table = _table("headlines", "claim", "hardware", "plan", "needed", "fits", "largest that fits")
    for found in findings:
        table.add_row(
            f"{found.name} ({found.source})",
            found.hardware,
            found.plan,
            f"{found.needed / 2**30:.1f} GiB",
            "yes" if found.fits else "no",
            f"{found.largest:,} {found.unit}",
        )
    console.print(table)
    console.print("\n".join(f"not possible: {words}" for words in NOT_POSSIBLE))


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=_PARTS, help="one of the tables; nothing is written")
    parser.add_argument("--quick", action="store_true", help="a few numbers, of which nothing is written")


SUITE = Suite("headlines", "known numbers of this field as estimates on their hardware", add_arguments, run)
