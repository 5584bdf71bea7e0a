"""``python -m benchmarks tables``: writes the pages of benchmarks/results and the README's figures from the results.

A table stands between ``<!-- benchmark:NAME -->`` and ``<!-- /benchmark -->``, on lines of their own; what
was there is replaced by one table for each hardware that NAME was run on.
"""

import argparse
import re
from collections.abc import Container, Sequence
from pathlib import Path

from benchmarks.harness.models_document import write_document
from benchmarks.harness.page_blocks import MarkerError, replace_block
from benchmarks.harness.predictions_document import write_document as write_predictions
from benchmarks.harness.report import format_value
from benchmarks.harness.results import RESULTS, Quantity, Results, Row, load_results
from benchmarks.registry import Suite
from benchmarks.suites.museum import write_document as write_exactness

README = Path(__file__).parent.parent / "README.md"
PAGES = sorted(RESULTS.glob("*.md"))

_BLOCK = re.compile(
    r"^<!-- benchmark:(?P<name>[\w-]+) -->\n(?P<table>.*?)^<!-- /benchmark -->$", re.MULTILINE | re.DOTALL
)

PICKED = (
    ("zero", "60M parameters, ZeRO 3", "tensorshard zero=3", "steady_peak_bytes"),
    ("zero", "60M parameters, ZeRO 2", "tensorshard zero=2", "steady_peak_bytes"),
    ("tensor", "Llama 512, 2 layers, 1024 tokens", "tensorshard tp=2", "peak_bytes"),
    ("pipeline", "8 MLP blocks, 4 ranks", "tensorshard pp=4, 1f1b", None),
    ("heads", "1 million classes, one process", "tensorshard, update, no logits kept", "peak_bytes"),
)
"""The rows of the README: benchmark, group, contender, and which memory is shown."""


def replace_tables(text: str, results: Sequence[Results]) -> str:
    """`text` with every marked block's content replaced by the tables of that benchmark.

    Raises:
        MarkerError: a block asks for a benchmark without results, or has no end.
    """
    opened = re.findall(r"^<!-- benchmark:([\w-]+) -->$", text, re.MULTILINE)
    if len(opened) != len(closed := list(_BLOCK.finditer(text))) or any(
        "<!-- benchmark:" in block["table"] for block in closed
    ):
        raise MarkerError(f"the blocks {', '.join(opened)} need a line '<!-- /benchmark -->' each after their table")

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        matching = [result for result in results if result.benchmark == name]
        if not matching:
            known = ", ".join(sorted({result.benchmark for result in results})) or "none"
            raise MarkerError(f"there are no results of a benchmark {name!r}; there are those of: {known}")
        table = "\n\n".join(markdown_table(result) for result in matching)
        return f"<!-- benchmark:{name} -->\n{table}\n<!-- /benchmark -->"

    return _BLOCK.sub(block, text)


def markdown_table(results: Results) -> str:
    """One benchmark's results on one hardware. Times measured on CPUs are given as ratios only: they say
    more about the machine and what else it was doing than about the contenders. Memory does not."""
    columns = [(q, q.unit != "s" or results.device == "cuda") for q in results.quantities if q.headline]
    compared = {
        q.key for q, _ in columns if any(_is_compared(row, q) for group in results.groups for row in group.rows)
    }
    header = ["", "contender"]
    for quantity, absolute in columns:
        header.append(quantity.label if absolute else f"{quantity.label}, x best peer")
        header += ["x best peer"] if absolute and quantity.key in compared else []
    lines = [_line(header), _line(["---", "---", *["---:"] * (len(header) - 2)])]
    for group in results.groups:
        title = group.title
        for row in group.rows:
            lines.append(
                _line([title, f"**{row.contender}**" if row.ours else row.contender, *_cells(row, columns, compared)])
            )
            title = ""
    versions = {name: version for group in results.groups for name, version in group.versions.items()}
    dates = sorted({group.date for group in results.groups})
    measured = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    stated = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([*lines, "", f"{results.hardware}, {measured}; {stated}."])


def _is_compared(row: Row, quantity: Quantity) -> bool:
    value = row.values.get(quantity.key)
    return quantity.is_compared and value is not None and value.ratio is not None


def _cells(row: Row, columns: Sequence[tuple[Quantity, bool]], compared: Container[str]) -> list[str]:
    cells: list[str] = []
    for quantity, absolute in columns:
        value = row.values.get(quantity.key)
        if absolute:
            note = "" if row.note in cells else row.note  # once is enough
            cells.append(format_value(value.median, quantity.unit) if value else note)
        if quantity.key in compared or not absolute:
            cells.append("" if value is None or value.ratio is None else f"{value.ratio:.2f}")
    return cells


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def replace_figures(text: str, results: Sequence[Results]) -> str:
    """`text` with its block of figures replaced: what was picked out of `results`, each beside its best peer.

    Raises:
        MarkerError: there is no such block, or no such result.
    """
    lines = [_line(["", "step time, x best peer", "peak memory, x best peer"]), _line(["---", "---:", "---:"])]
    for benchmark, title, contender, memory in PICKED:
        values = _picked(results, benchmark, title, contender).values
        ratios = [values[key].ratio if key else None for key in ("step_seconds", memory)]
        cells = ["" if ratio is None else f"{ratio:.2f}" if ratio >= 0.005 else "below 0.01" for ratio in ratios]
        lines.append(_line([f"{title}: {contender}", *cells]))
    return replace_block(text, "figures", "\n".join(lines))


def _picked(results: Sequence[Results], benchmark: str, title: str, contender: str) -> Row:
    for result in results:
        for group in result.groups:
            for row in group.rows:
                if (result.benchmark, group.title, row.contender) == (benchmark, title, contender):
                    return row
    raise MarkerError(f"there are no results of {contender!r} in {title!r} of the benchmark {benchmark!r}")


def run(arguments: argparse.Namespace) -> int:
    results = [load_results(path) for path in sorted(RESULTS.glob("*.json"))]
    for page in PAGES:
        text = page.read_text()
        page.write_text(replace_tables(text, results))
    print(f"{len(PAGES)} pages written from {len(results)} results file(s)")
    README.write_text(replace_figures(README.read_text(), results))
    print(f"{README.name}: {len(PICKED)} rows of figures")
    print(f"{write_document().name}: written from the results of the models")
    print(f"{write_exactness().name}: written from the results of the museum")
    print(f"{write_predictions().name}: written from what `tensorshard check` has measured")
    return 0


COMMAND = Suite(
    "tables", "writes the tables of the pages and the README's figures anew from the results", lambda parser: None, run
)
