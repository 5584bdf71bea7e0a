"""The blocks of code in README and docs, and the questions that the docs answer."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
QUESTIONS: dict[str, str] = tomllib.loads((ROOT / "tests/docs/questions.toml").read_text(encoding="utf-8"))
"""What people ask, and the page of docs/, with a heading's anchor, that answers."""

_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_NOT_RUN = re.compile(r"^ *<!-- not run: (.+) -->$")


@dataclass(frozen=True)
class Block:
    """One block of code.

    Attributes:
        page: its path in the repository; line: where it begins.
        language: what stands behind the fence; "" for nothing.
        reason: why it is not run, where the page says so in a comment before it.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str | None


def blocks(page: str) -> list[Block]:
    """All of a page's, in order; indentation is taken off."""
    found: list[Block] = []
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start: int | None = None
    indent, language, reason = "", "", None
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if start is None:
            if fence:
                start, indent, language = number, fence[1], fence[2]
            elif line.strip():
                comment = _NOT_RUN.match(line)
                reason = comment[1] if comment else None
        elif fence and not fence[2]:
            code = "\n".join(text.removeprefix(indent) for text in lines[start : number - 1]) + "\n"
            found.append(Block(page, start, language, code, reason))
            start, reason = None, None
    assert start is None, f"{page}: the block of line {start} has no end"
    return found
