"""The notebook: it runs, and what it shows is what comes out."""

import json
from importlib import util

import pytest

from pages import ROOT


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("nbclient") is None, reason='needs ".[docs]"; .ci/run runs it always')
def test_the_tour_shows_what_comes_out() -> None:
    from tour import TOUR, differences

    assert differences(TOUR) == [], "run: python .ci/tour.py --write"


def test_every_section_of_the_tour_has_a_picture() -> None:
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    sections: dict[str, int] = {}
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and text.startswith("## "):
            sections[text.splitlines()[0]] = 0
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error"
            if "image/svg+xml" in output.get("data", {}):
                sections[list(sections)[-1]] += 1
    assert len(sections) == 5 and all(count for title, count in sections.items() if title != "## What is next")
