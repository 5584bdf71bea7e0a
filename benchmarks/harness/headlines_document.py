"""The headlines: as tables on the terminal, in a results file, and in benchmarks/results/headlines.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.headlines import BERT_REPORTED, Finding
from benchmarks.harness.page_blocks import replace_block
from benchmarks.harness.results import RESULTS
from benchmarks.harness.zero_table import SIZES, StatesCell

PAGE = RESULTS / "headlines.md"
FILE = RESULTS / "estimate" / "headlines.json"
MB = 1_000_000


@dataclass
class HeadlineResults:
    """The results of the benchmark's parts, each from its last run.

    Args:
        zero: the ZeRO paper's table. bert: bytes of BERT-Large by the number of ranks. models: the headlines.
    """

    zero: list[StatesCell]
    bert: dict[int, int]
    models: list[Finding]

    @classmethod
    def load(cls, path: Path = FILE) -> "HeadlineResults":
        """The results in the file; empty if there is no file."""
        if not path.exists():
            return cls([], {}, [])
        document = json.loads(path.read_text())
        return cls(
            [StatesCell(**cell) for cell in document["zero"]],
            {int(ranks): nbytes for ranks, nbytes in document["bert"].items()},
            [Finding(**finding) for finding in document["models"]],
        )


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Args:
        below: a sentence below it.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: str = ""

    def print(self, console: Console) -> None:
        """Prints the table on the terminal."""
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for head in self.heads:
            table.add_column(head, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        if self.below:
            console.print(self.below)

    def markdown(self) -> list[str]:
        """The table as lines of a page."""
        lines = [f"{self.title}:", "", _row(self.heads), _row(["---"] * len(self.heads)), *map(_row, self.rows)]
        return [*lines, "", self.below] if self.below else lines


def models_table(findings: Sequence[Finding]) -> TextTable:
    """The headlines: whether each fits, and the largest model of its shape that does."""
    rows = []
    for finding in findings:
        claim = f"{finding.name} ({finding.source}); {finding.notes}"
        elsewhere = [
            f"{_binary(nbytes)} {where}"
            for nbytes, where in ((finding.host_bytes, "in host memory"), (finding.disk_bytes, "on disk"))
            if nbytes
        ]
        largest = f"{finding.largest:,} {finding.unit}: {_count(finding.largest_parameters)} parameters"
        rows.append(
            [
                claim,
                f"{finding.hardware}, {_binary(finding.memory)}",
                finding.plan,
                f"{finding.size:,} {finding.unit}: {_count(finding.parameters)} parameters",
                ", ".join([_binary(finding.needed), *elsewhere]),
                "yes" if finding.fits else "no",
                largest if finding.largest else "none",
            ]
        )
    heads = ("claim", "hardware", "plan", "model", "a rank takes", "fits", "largest of its shape that fits")
    return TextTable("Known numbers, as estimates on their hardware", heads, rows)


def bert_table(measured: Mapping[int, int]) -> TextTable:
    """BERT-Large over more and more ranks, beside the reported numbers."""
    rows = [
        [
            str(count),
            f"{BERT_REPORTED[count]:,} MB",
            f"{BERT_REPORTED[count] / BERT_REPORTED[1]:.2f}",
            f"{nbytes / MB:,.0f} MB",
            f"{nbytes / measured[1]:.2f}",
        ]
        for count, nbytes in measured.items()
    ]
    title = "BERT-Large with sharding, recomputation and mixed precision, as Paddle Fleet reports it and as estimated"
    below = "Samples of a rank are as many as make one rank take what was reported of it; live tensors."
    return TextTable(title, ("ranks", "Paddle Fleet", "of one rank", "estimated", "of one rank"), rows, below)


def states_table(cells: Sequence[StatesCell]) -> TextTable:
    """The ZeRO paper's table: GB of model states by devices, model and level, with the paper's in brackets."""
    rows = []
    for devices in sorted({cell.devices for cell in cells}):
        row = [str(devices)]
        for size in SIZES:
            for cell in cells:
                if (cell.size, cell.devices) == (size, devices):
                    paper = cell.paper / cell.parameters * SIZES[size] / 1e9
                    row.append(f"{cell.gigabytes:.4g} ({paper:.4g})")
        rows.append(row)
    heads = ["devices", *(f"{size}, {level}" for size in SIZES for level in ("os", "os+g", "os+g+p"))]
    heads = heads[: len(rows[0])] if rows else heads
    worst = max((abs(cell.error) for cell in cells), default=0.0)
    below = (
        f"Runs of the Engine on fake tensors are at most {worst:.2%} off the formula of what is kept here, which is "
        f"not the paper's: a rank's shard of the gradients is in fp32, 2 bytes a parameter of the shard more; a full "
        f"gradient is gone as soon as it is reduced, at level 1, too; and on one device, where nothing is gathered, "
        f"level 3 keeps weights in 16 bits beside fp32 masters, as the others do."
    )
    return TextTable("GB of model states of a device, and in brackets those of the ZeRO paper", heads, rows, below)


def write_headlines(results: HeadlineResults) -> None:
    """Writes the results, and the block of the page."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "date": date.today().isoformat(),
        "versions": installed_versions(["torch", "tensorshard"]),
        **asdict(results),
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    PAGE.write_text(replace_block(PAGE.read_text(), "headlines", markdown(results)))


def markdown(results: HeadlineResults) -> str:
    """All tables that have results."""
    made = [
        models_table(results.models) if results.models else None,
        bert_table(results.bert) if results.bert else None,
        states_table(results.zero) if results.zero else None,
    ]
    return "\n".join("\n".join([*table.markdown(), ""]) for table in made if table is not None).rstrip()


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _binary(nbytes: int) -> str:
    return f"{nbytes / 2**40:.2f} TiB" if nbytes >= 2**40 else f"{nbytes / 2**30:.1f} GiB"


def _count(number: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number / 1e6:.3g}M"
