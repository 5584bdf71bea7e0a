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


@pytest.mark.parametrize("name", ["zero.svg", "mesh.svg", "memory.svg"])
def test_a_picture_is_what_the_script_draws(name):
    drawn = _script().PICTURES[name]()
    assert (_SCRIPT.parent / name).read_text(encoding="utf-8") == drawn, "run: python docs/pictures/draw.py"
    ElementTree.fromstring(drawn)
    assert "prefers-color-scheme: dark" in drawn


def test_what_the_levels_hold():
    assert [_script().bytes_held(level, ranks=4) for level in range(4)] == [16, 10, 7, 4]


@pytest.mark.parametrize("page", ["README.md", "docs/sharding.md", "docs/pipelines.md", "docs/estimate.md"])
def test_pictures_that_are_shown_exist_and_have_words(page):
    shown = re.findall(r"!\[(.*?)\]\((.*?)\)", (_ROOT / page).read_text(encoding="utf-8"))
    assert shown
    for words, path in shown:
        assert len(words) > 60 and ((_ROOT / page).parent / path).is_file()
