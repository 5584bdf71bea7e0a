"""Results files of the models: one file per family, one line per cell."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorshard
from benchmarks.harness.models_cells import Cell
from benchmarks.harness.results import RESULTS

FOLDER = RESULTS / "models"


@dataclass
class FamilyResults:
    """The results of a family.

    Args:
        versions: of Python and libraries, in the last run.
        date: of the last run, ISO 8601.
        cells: by case and plan, each with the revision of the sources that it was run with.
    """

    family: str
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    cells: dict[str, dict[str, tuple[str, Cell]]] = field(default_factory=dict)

    def is_done(self, case: str, plan: str, revision: str) -> bool:
        """Whether the cell was run with these sources."""
        return self.cells.get(case, {}).get(plan, ("",))[0] == revision

    def add(self, case: str, plan: str, revision: str, cell: Cell) -> None:
        """Adds a cell, or replaces an older one."""
        self.cells.setdefault(case, {})[plan] = (revision, cell)

    def save(self) -> Path:
        """Writes the file in one atomic step; returns its path."""
        path = _path(self.family)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for case, plans in self.cells.items():
            cells = [
                f"   {json.dumps(plan)}: {json.dumps({'revision': revision, **_packed(cell)})}"
                for plan, (revision, cell) in plans.items()
            ]
            lines.append(f"  {json.dumps(case)}: {{\n" + ",\n".join(cells) + "\n  }")
        head = f' "family": {json.dumps(self.family)},\n "date": {json.dumps(self.date)},\n'
        head += f' "versions": {json.dumps(self.versions)},\n'
        unfinished = path.with_suffix(".part")
        unfinished.write_text("{\n" + head + ' "cells": {\n' + ",\n".join(lines) + "\n }\n}\n")
        unfinished.replace(path)
        return path


def load_family(family: str) -> FamilyResults:
    """The results of a family; empty if there are none."""
    path = _path(family)
    if not path.exists():
        return FamilyResults(family)
    content = json.loads(path.read_text())
    cells = {
        case: {plan: (packed.pop("revision"), _unpacked(packed)) for plan, packed in plans.items()}
        for case, plans in content["cells"].items()
    }
    return FamilyResults(content["family"], content["versions"], content["date"], cells)


def source_revision() -> str:
    """A name for tensorshard's sources as they are on disk."""
    package = Path(tensorshard.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _path(family: str) -> Path:
    return FOLDER / f"{family}.json"


def _packed(cell: Cell) -> dict[str, Any]:
    plain = Cell(cell.status)
    values = {name: value for name, value in vars(cell).items() if name == "status" or value != getattr(plain, name)}
    if cell.with_samples is not None:
        values["with_samples"] = _packed(cell.with_samples)
    return values


def _unpacked(values: dict[str, Any]) -> Cell:
    samples = values.pop("with_samples", None)
    return Cell(**values, with_samples=None if samples is None else _unpacked(samples))
