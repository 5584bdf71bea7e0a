"""Results files: the measurements, on which hardware, with which versions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.statistics import Comparison, compare

RESULTS = Path(__file__).parent.parent / "results"


@dataclass(frozen=True)
class Quantity:
    """Something that is measured. Less is better.

    Args:
        key: its name in a results file.
        label: its name in a table.
        unit: "s"; "bytes" of memory, or "B" for few of them; "share" of the whole; "times" another
            quantity; "error", a number; "count"; "classes", "tokens" or "parameters/s", of which more is better.
        headline: whether the README's table has it too; the terminal's and the results file always do.
    """

    key: str
    label: str
    unit: str
    headline: bool = True

    @property
    def is_compared(self) -> bool:
        """Whether a ratio makes sense. For errors and counts it does not."""
        return self.unit in ("s", "bytes", "B")


@dataclass(frozen=True)
class Row:
    """The results of one contender.

    Args:
        ours: whether it is tensorshard.
        values: the comparison of each quantity, by the quantity's key; empty where nothing was measured.
        loss: at the end of the run, in nats, where the contender trains something.
        note: why nothing was measured.
    """

    contender: str
    ours: bool
    values: dict[str, Comparison] = field(default_factory=dict)
    loss: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Contenders that did the same work in turn, so they can be compared.

    Args:
        title: what the work was. A group replaces the one with the same title in a results file.
        date: ISO 8601.
        versions: of Python and of the contenders' libraries.
        settings: sizes and numbers of steps.
    """

    title: str
    date: str
    versions: dict[str, str]
    settings: dict[str, Any]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Results:
    """The content of one results file.

    Args:
        hardware: as :func:`benchmarks.harness.hardware.hardware_name` puts it.
        device: "cpu" or "cuda".
    """

    benchmark: str
    hardware: str
    device: str
    quantities: tuple[Quantity, ...]
    groups: tuple[Group, ...]

    def updated(self, groups: Sequence[Group]) -> "Results":
        """These results with `groups` in place of those of the same titles, or at the end."""
        new = {group.title: group for group in groups}
        current = [new.pop(group.title, group) for group in self.groups]
        return replace(self, groups=(*current, *new.values()))


def make_rows(
    samples: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    ours: Sequence[str],
    losses: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
) -> tuple[Row, ...]:
    """Rows of a group from its raw measurements.

    Args:
        samples: for each quantity's key, each contender's measurements, one a round.
        ours: the contenders that are tensorshard; all others are peers.
        losses: the final loss of each contender that trains.
        notes: contenders that could not be measured, and why.
    """
    contenders = list(next(iter(samples.values()), {}))
    peers = [name for name in contenders if name not in ours]
    comparisons = {key: compare(values, peers) for key, values in samples.items()}
    measured = [
        Row(
            contender=name,
            ours=name in ours,
            values={key: values[name] for key, values in comparisons.items() if name in values},
            loss=(losses or {}).get(name),
        )
        for name in contenders
    ]
    return (*measured, *(Row(name, name in ours, note=note) for name, note in (notes or {}).items()))


def results_path(benchmark: str, hardware: str) -> Path:
    """Where the results of `benchmark` on `hardware` are kept."""
    return RESULTS / f"{benchmark}-{hardware}.json"


def load_results(path: Path) -> Results:
    """Reads what :func:`save_results` wrote."""
    content = json.loads(path.read_text())
    content["quantities"] = tuple(Quantity(**quantity) for quantity in content["quantities"])
    content["groups"] = tuple(_load_group(group) for group in content["groups"])
    return Results(**content)


def save_results(results: Results) -> Path:
    """Writes `results` to their file, and keeps the file's groups that were not measured again; returns its path."""
    path = results_path(results.benchmark, results.hardware)
    if path.exists():
        earlier = load_results(path)
        results = replace(results, groups=earlier.updated(results.groups).groups)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(results), indent=1) + "\n")
    return path


def _load_group(content: dict[str, Any]) -> Group:
    return Group(**{**content, "rows": tuple(_load_row(row) for row in content["rows"])})


def _load_row(content: dict[str, Any]) -> Row:
    values = {
        key: Comparison(**{**value, "rounds": tuple(value["rounds"])}) for key, value in content["values"].items()
    }
    return Row(**{**content, "values": values})
