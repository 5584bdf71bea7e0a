"""What people ask of the docs (questions.toml) has a page and a heading that answer, one click away."""

import re

import pytest

from pages import QUESTIONS, ROOT

_NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]


def _anchors(page: str) -> set[str]:
    """The anchors of a page's headings, and "" for its beginning."""
    text = re.sub(
        r"^```.*?^```$", "", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    words = (re.sub(r"[^\w\s-]", "", heading).lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {"", *(re.sub(r"[-\s]+", "-", heading.strip()) for heading in words)}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_has_an_answer_in_the_nav(question):
    page, _, anchor = QUESTIONS[question].partition("#")
    assert f": {page}\n" in f"{_NAV}\n"
    assert anchor in _anchors(page)


def test_there_are_sixty_questions():
    assert len(QUESTIONS) >= 60
    pages = set(re.findall(r": ([\w-]+\.md)$", _NAV, re.MULTILINE))
    unasked = pages - {answer.partition("#")[0] for answer in QUESTIONS.values()}
    assert unasked <= {"tour.md", "architecture.md", "torch-releases.md"}


def test_each_table_of_measurements_is_a_link_away():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    tables = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.md")}
    assert len(tables) > 15 and tables <= set(re.findall(r"\]\(\.\./benchmarks/results/([\w-]+\.md)\)", pages))
