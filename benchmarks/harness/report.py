"""Results on the terminal."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.hardware import hardware_name
from benchmarks.harness.results import Group, Quantity, Results, Row, save_results


def make_console() -> Console:
    """A console as wide as the terminal, or wide enough for the tables if there is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 110)


def print_group(console: Console, group: Group, quantities: Sequence[Quantity]) -> None:
    """Prints a group as a table: each quantity's median, its ratio to the best peer, that ratio's range."""
    table = Table(
        title=group.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption="x: times the best peer's median (lowest to highest of a round)",
        caption_justify="left",
    )
    table.add_column("contender", no_wrap=True)
    for quantity in quantities:
        table.add_column(quantity.label, justify="right")
    if any(row.loss is not None for row in group.rows):
        table.add_column("final loss", justify="right")
    for row in group.rows:
        table.add_row(*_cells(row, quantities), style="bold" if row.ours else None)
    console.print(table)


def write_results(
    console: Console, name: str, quantities: Sequence[Quantity], groups: Sequence[Group], device: str = "cpu"
) -> None:
    """Adds measurements on this machine to the results called `name`, and prints where they are.

    Args:
        device: "cpu", or "cuda" for what was measured on its GPUs.
    """
    results = Results(name, hardware_name(device), device, tuple(quantities), tuple(groups))
    console.print(f"Written to {save_results(results)}")


def format_value(value: float, unit: str) -> str:
    """`value`, of one of the units of :class:`Quantity`, for people: in s or ms, or in MB (1e6 bytes)."""
    match unit:
        case "bytes":
            return f"{value / 1e6:.0f} MB"
        case "share":
            return f"{value:.1%}"
        case "B":
            return f"{value:.0f} B"
        case "B/parameter":
            return f"{value:.1f} B"
        case "times":
            return f"{value:.2f}"
        case "parameters/s":
            return f"{value / 1e6:.0f} million/s"
        case "error":
            return f"{value:.1e}"
        case "tokens" | "count":
            return f"{value:,.0f}"
        case "classes":
            return f"{value / 1e6:.1f} million"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def _cells(row: Row, quantities: Sequence[Quantity]) -> list[str]:
    if row.note:
        return [row.contender, row.note]
    cells = [row.contender]
    for quantity in quantities:
        value = row.values.get(quantity.key)
        if value is None:
            cells.append("")
            continue
        cell = format_value(value.median, quantity.unit)
        if value.ratio is not None and quantity.is_compared:
            cell += f"  {value.ratio:.2f}x"
            if value.lowest_ratio != value.highest_ratio:
                cell += f"\n{value.lowest_ratio:.2f}-{value.highest_ratio:.2f}x"
        cells.append(cell)
    if row.loss is not None:
        cells.append(f"{row.loss:.4f}")
    return cells
