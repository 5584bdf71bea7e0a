"""Runs examples/tour.ipynb and compares what its cells print and draw with what the file has.

``python .ci/tour.py`` names what differs; ``python .ci/tour.py --write`` puts what came out into the file.
"""

import math
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

TOUR = Path(__file__).parents[1] / "examples" / "tour.ipynb"

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_CLOSE = 0.02  # up to which two numbers count as the same, relative to them: other machines round otherwise
_LABEL = re.compile(r'aria-label="([^"]*)"')
_SECONDS = 600  # that a cell may take


def run(path: Path) -> Any:
    """The notebook after all of its cells have run, each picture without the text that stands for it.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(
        notebook, timeout=_SECONDS, kernel_name="python3", resources=resources, record_timing=False
    ).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/svg+xml" in output.get("data", {}):
                output["data"] = {"image/svg+xml": output["data"]["image/svg+xml"]}
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec",)}
    return notebook


def differences(path: Path) -> list[str]:
    """What the cells of `path` print and draw now that is not what they have there."""
    before = nbformat.read(path, as_version=4)
    found = []
    for number, (old, new) in enumerate(zip(before.cells, run(path).cells, strict=True)):
        for kind, was, now in zip(("prints", "draws"), _said(old), _said(new), strict=True):
            if not _alike(was, now):
                found.append(f"cell {number} {kind}\n{now}\nand the file has\n{was}")
    return found


def _said(cell: Any) -> tuple[str, str]:
    """The lines that a cell printed, in order of the alphabet, as ranks take turns; and the names of its pictures."""
    outputs = cell.get("outputs", [])
    lines = "".join(output["text"] for output in outputs if output.output_type == "stream").splitlines()
    pictures = [output["data"]["image/svg+xml"] for output in outputs if "image/svg+xml" in output.get("data", {})]
    return "\n".join(sorted(lines)), "\n".join(
        match[1] for text in pictures for match in [_LABEL.search(text)] if match
    )


def _alike(first: str, second: str) -> bool:
    """Whether two texts have the same words, and numbers that are close."""
    if _NUMBER.sub("0", first) != _NUMBER.sub("0", second):
        return False
    pairs = zip(_NUMBER.findall(first), _NUMBER.findall(second), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=_CLOSE) for a, b in pairs)


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        nbformat.write(run(TOUR), TOUR)
        return 0
    found = differences(TOUR)
    print("\n\n".join(found) or f"{TOUR.name} is as it was")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
