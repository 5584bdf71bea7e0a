"""The pictures of README and docs are what their script draws, and are shown with words for who cannot see them."""

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "docs" / "pictures" / "draw.py"


def _script():
    spec = importlib.util.spec_from_file_location("draw_pictures", _SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("name", list(_script().PICTURES))
def test_a_picture_is_what_the_script_draws(name):
    drawn = _script().PICTURES[name]()
    assert (_SCRIPT.parent / name).read_text(encoding="utf-8") == drawn, "run: python docs/pictures/draw.py"
    ElementTree.fromstring(drawn)
    assert "prefers-color-scheme: dark" in drawn


def test_what_the_levels_hold():
    assert [_script().bytes_held(level, ranks=4) for level in range(4)] == [16, 10, 7, 4]


def test_what_is_in_memory_and_on_disk():
    def row(contender: str, peak: float | None) -> dict:
        values = {} if peak is None else {"peak_bytes": {"median": peak}}
        return {"contender": contender, "ours": True, "values": values, "note": "" if peak else "killed"}

    rows = [row("in memory", None), row("on disk", 6e9)]
    on_disk = {"on disk": {"master weights": 6e9, "optimizer states": 12e9}}
    group = {"title": "a GPT", "rows": rows, "settings": {"memory_bytes": 8e9, "on_disk": on_disk}}
    drawn = _script().draw_offload(group)
    ElementTree.fromstring(drawn)
    widths = re.findall(r'width="([\d.]+)" height="20" rx="0" class="(\w+)"', drawn)
    assert widths == [("130", "memory"), ("130", "parameters"), ("260", "states")]
    assert "6.0 of 24.0 GB" in drawn and ">killed<" in drawn and "limit: 8 GB" in drawn


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/sharding.md", "docs/pipelines.md", "docs/estimate.md", "docs/offload.md", "docs/planning.md"],
)
def test_pictures_that_are_shown_exist_and_have_words(page):
    shown = re.findall(r"!\[(.*?)\]\((.*?)\)", (_ROOT / page).read_text(encoding="utf-8"))
    assert shown
    for words, path in shown:
        assert len(words) > 60 and ((_ROOT / page).parent / path).is_file()
