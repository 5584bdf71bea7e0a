"""The pictures of README and docs are what their script draws, and are shown with words for who cannot see them."""

import ast
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compute import table
from drawings import DRAWINGS
from drawings.diagrams import IMPORTS
from drawings.offload import draw_offload
from drawings.svg import PICTURES, STYLE
from drawings.zero import bytes_held
from pages import PAGES, ROOT
from record import Screen
from tensorshard.predict.page_frame import STYLE as PAGE_STYLE

_PACKAGE = ROOT / "src" / "tensorshard"


@pytest.mark.parametrize("name", list(DRAWINGS))
def test_a_picture_is_what_the_script_draws(name):
    drawn = DRAWINGS[name]()
    assert (PICTURES / name).read_text(encoding="utf-8") == drawn, "run: python docs/pictures/draw.py"
    ElementTree.fromstring(drawn)
    assert "prefers-color-scheme: dark" in drawn


def test_the_table_that_is_drawn_is_the_one_that_is_found():
    assert json.loads((PICTURES / "table.json").read_text()) == table()


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_mean_the_same_in_pictures_and_on_pages(mode):
    of_pictures = STYLE.split("prefers-color-scheme: dark")[mode == "dark"]
    of_pages = PAGE_STYLE.split("prefers-color-scheme: dark")[mode == "dark"]
    for kind in ("parameters", "gradients", "optimizer-states", "activations", "gathered-parameters", "temporaries"):
        shown = {"optimizer-states": "states", "gathered-parameters": "gathered"}.get(kind, kind)
        (colour,) = re.findall(rf"\.{shown} {{ fill: (#\w+)", of_pictures)
        assert f".{kind} {{ fill: {colour};" in of_pages, kind


def _imports(name: str) -> set[str]:
    """What the files of a box of the diagram import."""
    paths = [path for path in (_PACKAGE / name).rglob("*.py") if path.is_file()]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.slow_cases("trainer/-parallelize/")
@pytest.mark.parametrize(("source", "target"), IMPORTS)
def test_each_arrow_of_the_diagram_is_an_import(source, target):
    module = "tensorshard." + target.rstrip("/").removesuffix(".py")
    assert any(f"{name}.".startswith(f"{module}.") for name in _imports(source))


def test_what_a_terminal_shows():
    screen = Screen()
    screen.write("one\r\ntwo 10%\rtwo 99%\r\n\x1b[1mthree\x1b[0m\x1b[1A\r\x1b[2Kdone\n")
    assert screen.lines == ["one", "done", "three"]


def test_what_the_levels_hold():
    assert [bytes_held(level, ranks=4) for level in range(4)] == [16, 10, 7, 4]


def test_what_is_in_memory_and_on_disk():
    def row(contender: str, peak: float | None) -> dict:
        values = {} if peak is None else {"peak_bytes": {"median": peak}}
        return {"contender": contender, "ours": True, "values": values, "note": "" if peak else "killed"}

    rows = [row("in memory", None), row("on disk", 6e9)]
    on_disk = {"on disk": {"master weights": 6e9, "optimizer states": 12e9}}
    group = {"title": "a GPT", "rows": rows, "settings": {"memory_bytes": 8e9, "on_disk": on_disk}}
    drawn = draw_offload(group)
    ElementTree.fromstring(drawn)
    widths = re.findall(r'width="([\d.]+)" height="20" rx="0" class="(\w+)"', drawn)
    assert widths == [("130", "memory"), ("130", "parameters"), ("260", "states")]
    assert "6.0 of 24.0 GB" in drawn and ">killed<" in drawn and "limit: 8 GB" in drawn


def _shown(page: str) -> list[tuple[str, str]]:
    return re.findall(r"!\[(.*?)\]\((.*?)\)", (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [page for page in PAGES if _shown(page)])
def test_pictures_that_are_shown_exist_and_have_words(page):
    for words, path in _shown(page):
        assert len(words) > 60 and ((ROOT / page).parent / path).is_file()


def test_every_picture_is_shown():
    shown = {Path(path).name for page in PAGES for _, path in _shown(page)}
    assert set(DRAWINGS) <= shown
