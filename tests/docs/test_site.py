"""The docs site: its check finds what is wrong, its API reference has every public name, and it builds."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib import import_module, util
from pathlib import Path

import pytest

import tensorshard as ts
from browser import find_browser, look_at_pages
from check_site import check_files
from pages import QUESTIONS, ROOT

_API = sorted((ROOT / "docs" / "api").glob("*.md"))
_ENTRY = re.compile(r"^::: (\S+)\n    options: \{ heading: (\S+), toc_label: (\S+) \}$", re.MULTILINE)
_HEAD = '<!doctype html><link rel="icon" href="data:,"><body>'
_FIRST = (
    '<p id="here"><a href="#here"><img src="a.svg" alt="a square"><a href="b/c.html#there"><a href="https://a.org">'
)
_SECOND = '<h1 id="there"><a href="../index.html#here">'
_PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


def _site(folder: Path, more: str) -> Path:
    """A site of two pages, with `more` on its first."""
    (folder / "b").mkdir()
    (folder / "a.svg").write_text(_PICTURE)
    (folder / "index.html").write_text(f"{_HEAD}{_FIRST}{more}")
    (folder / "b" / "c.html").write_text(f"{_HEAD}{_SECOND}")
    return folder


def test_a_site_without_faults(tmp_path):
    assert check_files(_site(tmp_path, "")) == []


@pytest.mark.parametrize(
    ("more", "fault"),
    {
        "a page": ('<a href="d.html">', "d.html leads nowhere"),
        "a page outside": ('<a href="../src/a.py">', "../src/a.py leads nowhere"),
        "an anchor": ('<a href="b/c.html#nowhere">', "b/c.html has no such anchor"),
        "an own anchor": ('<a href="#nowhere">', "index.html has no such anchor"),
        "a picture": ('<img src="b.svg" alt="b">', "b.svg leads nowhere"),
        "a picture's words": ('<img src="a.svg">', "a.svg has no words for who cannot see it"),
        "a script": ('<script src="https://a.org/a.js"></script>', "https://a.org/a.js is loaded from elsewhere"),
        "a font": ('<link rel="preconnect" href="//a.org">', "//a.org is loaded from elsewhere"),
    }.values(),
)
def test_each_fault_is_named(tmp_path, more, fault):
    (found,) = check_files(_site(tmp_path, more))
    assert found.startswith("index.html: ") and found.endswith(fault)


def test_a_folder_without_pages_is_no_site(tmp_path):
    assert check_files(tmp_path) == [f"{tmp_path} has no pages"]


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium")
def test_what_only_a_browser_sees(tmp_path):
    script = "<script>console.error('oh no'); new Image().src = 'http://a.invalid/a.png'; nothing()</script>"
    site = _site(tmp_path, f'{script}<img src="b.svg" alt="b"><div style="width: 900px">wide</div>')
    faults = "\n".join(look_at_pages(find_browser(), site, ["index.html", "b/c.html"]))
    assert "c.html" not in faults and "the page is" not in faults.split("index.html, narrow")[0]
    for fault in (
        "the console says oh no",
        "http://a.invalid/a.png is asked for",
        "nothing is not defined",
        "b.svg is not shown",
        "pixels wider than its window",
    ):
        assert fault in faults


def test_every_public_name_is_in_the_reference():
    entries = {heading: path for page in _API for path, heading, _ in _ENTRY.findall(page.read_text(encoding="utf-8"))}
    names = {f"ts.{name}" for name in ts.__all__} - {"ts.init_process_group"}  # which is ts.distributed's
    for module in ("data", "nn", "nn.functional", "distributed", "utils", "utils.data"):
        names |= {f"ts.{module}.{name}" for name in import_module(f"tensorshard.{module}").__all__}
        names.remove(f"ts.{module}")
    assert names - set(entries) == {"ts.nn.init"}  # a module, whose function is there
    for heading, path in entries.items():
        place, name = re.sub(r"^ts\b", "tensorshard", heading).rsplit(".", 1)
        module, defined = path.rsplit(".", 1)
        assert getattr(import_module(place), name) is getattr(import_module(module), defined), heading


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site."""
    if util.find_spec("mkdocs") is None:
        pytest.skip('needs ".[docs]"; .ci/run builds it always')
    site = tmp_path_factory.mktemp("built") / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    found = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    return site


def test_the_site_builds(built):
    assert check_files(built) == []
    assert shutil.which("chromium") is None or not look_at_pages(find_browser(), built, ["index.html"])
    pages = re.findall(r"^- \[.+\]\((\S+)\): .{20}", (built / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(pages) > 30 and all((built / page).is_file() for page in pages)


def test_the_search_finds_the_answers(built):
    sections = json.loads((built / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    own = [one for one in sections if not one["location"].startswith(("source/", "api/"))]
    indexed = [(one["location"].partition("#")[0], _stems(one["title"]), Counter(_stems(one["text"]))) for one in own]
    known = Counter(stem for _, title, text in indexed for stem in {*title, *text})
    missed = {}
    for question, answer in QUESTIONS.items():
        asked = {stem: math.log(len(indexed) / known[stem]) for stem in _stems(question) if stem in known}
        scores: dict[str, float] = {}  # the best section of each page
        for page, title, text in indexed:
            score = sum(rare * (2 * (stem in title) + text[stem] / (text[stem] + 1)) for stem, rare in asked.items())
            scores[page] = max(scores.get(page, 0), score)
        first = sorted(scores, key=scores.__getitem__, reverse=True)[:8]
        if answer.partition("#")[0].replace(".md", ".html") not in first:
            missed[question] = first
    assert not missed


def _stems(text: str) -> list[str]:
    """The words of a text, each by its first letters, without a plural's s."""
    return [word.rstrip("s")[:6] for word in re.findall(r"\w{2,}", re.sub(r"<[^>]*>", " ", text.lower()))]
