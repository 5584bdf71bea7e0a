"""The page of an estimate: it stands alone, is well formed, and shows what it was given."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tensorshard as ts
from tensorshard.predict import Estimate, MemoryProfile, RankEstimate
from tensorshard.predict.page import stacked_chart
from tensorshard.predict.page_frame import STYLE, plan_section
from tensorshard.predict.rank_estimate import CATEGORIES, LargeTensor, Moment, moments
from tensorshard.predict.storage_ledger import Event

MIB = 1 << 20
PLAN = ts.Plan(pp=2, tp=2, micro_batches=4).resolve(8)


def _rank(stage: int, activations: int) -> RankEstimate:
    held = dict.fromkeys(CATEGORIES, 0) | {"parameters": 3 * MIB, "activations": activations}
    peak = sum(held.values())
    history = [Moment("forward", (3 * MIB, 0, 0, 0, activations * i // 9, 0, 0)) for i in range(10)] + [
        Moment("backward", (3 * MIB, 0, 0, 0, activations * i // 9, 0, 0)) for i in reversed(range(10))
    ]
    tensor = LargeTensor(MIB, "activations", (4, 8), "float32", "forward", "aten.mm.default", "<mine>.py:7", 3)
    return RankEstimate(4 * stage, stage, peak, 2 * peak, 2 * peak, held, "forward", [tensor], [], history)


class _Page(HTMLParser):
    """What a page refers to, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.references += [f"{tag} {name}" for name, _ in attributes if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    estimated = Estimate(PLAN, 8, [_rank(0, 9 * MIB), _rank(1, 5 * MIB)])
    measured = MemoryProfile(PLAN, 8, [_rank(0, 8 * MIB)]).joined([MemoryProfile(PLAN, 8, [_rank(1, 6 * MIB)])])
    measured.to_html(folder / "both.html", estimated)
    estimated.to_html(folder / "estimated.html", memory="1MiB")
    return folder


def test_both_sides_are_shown(written: Path) -> None:
    text = (written / "both.html").read_text()
    page = _Page(text)
    said = " ".join(page.words)
    assert not page.references and "@import" not in text and "url(" not in text  # it needs no network
    assert "estimated, rank 0: at most 12.0 MiB" in said and "measured, rank 4: at most 9.00 MiB" in said
    assert "<mine>.py:7, aten.mm.default in forward" in said and "<mine>" not in text
    assert text.count('class="rank"') == 8 and "1f1b: 2 ranks" in said
    for picture in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + picture[: picture.index("</svg>")] + "</svg>")


def test_the_mesh_says_which_part_of_the_experts_a_rank_has() -> None:
    drawn = "".join(plan_section(ts.Plan(tp=2, ep=2, cp=2).resolve(8), 8))
    parts = re.findall(r">(\d+)<sub>e(\d)</sub>", drawn)
    assert parts == [(str(rank), str(rank // 2 % 2 + 1)) for rank in range(8)]
    assert "e1 to e2 are the parts of the experts" in drawn
    assert "<sub>" not in "".join(plan_section(PLAN, 8))


def test_the_verdict_is_on_it(written: Path) -> None:
    text = (written / "estimated.html").read_text()
    assert 'class="verdict bad">does not fit: 24.0 MiB' in text and "prefers-color-scheme: dark" in STYLE


def test_a_browser_lays_it_out(written: Path, tmp_path: Path) -> None:
    """In Chromium where it is installed; elsewhere by its tags, which have to be closed."""
    browser = shutil.which("chromium")
    page = written / "both.html"
    if browser is None:
        text = page.read_text()
        assert all(
            text.count(f"<{tag}") == text.count(f"</{tag}>") for tag in ("table", "div", "figure", "svg", "main")
        )
        return
    picture = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    command = [browser, *options, f"--screenshot={picture}", "--window-size=900,1200", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert picture.stat().st_size > 10_000  # an empty page of this size takes fewer


def test_moments_keep_every_peak() -> None:
    events = [Event(i, 10, "forward") for i in range(1000)] + [Event(i, -10, "backward") for i in range(1000)]
    found = moments(events, ["inputs"] * 1000, CATEGORIES)
    assert max(moment.total for moment in found) == 10_000 and len(found) < 1000
    assert [moment.phase for moment in found] == sorted((moment.phase for moment in found), reverse=True)


def test_what_is_there_at_the_start_is_one_moment() -> None:
    events = [Event(i, 10, "initialization") for i in range(50)] + [Event(50, 5, "forward")]
    found = moments(events, ["inputs"] * 51, CATEGORIES)
    assert [(moment.phase, moment.total) for moment in found] == [("initialization", 500), ("forward", 505)]


def test_a_notebook_shows_the_fullest_rank() -> None:
    estimated = Estimate(PLAN, 8, [_rank(0, 9 * MIB), _rank(1, 5 * MIB)])
    drawn = estimated._repr_svg_()
    ElementTree.fromstring(drawn)
    assert "estimated, rank 0: at most 12.0 MiB" in drawn and ">activations<" in drawn and ">gradients<" not in drawn
    # Rules of a picture among others hold for it alone.
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", drawn.partition("<style>")[2].partition("</style>")[0])
    selectors = [part.strip() for rule in rules for part in rule.split("{")[-1].split(",")]
    assert all(selector.startswith(".tensorshard-chart") for selector in selectors)


def test_a_chart_of_no_memory() -> None:
    ElementTree.fromstring(stacked_chart([], 0, "nothing & nothing"))
