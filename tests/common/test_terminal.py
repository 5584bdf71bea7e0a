"""Long lines are broken at words, and nothing of them is lost."""

import pytest

from tensorshard.common.words import fit

_PLAN = """\
mesh           pp=1  dp_replicate=1  dp_shard=2  cp=1  tp=1
zero           3 (parameters are sharded over dp_shard)"""


def test_what_is_broken_off_stands_under_the_text() -> None:
    assert fit(_PLAN, 40).splitlines() == [
        "mesh           pp=1  dp_replicate=1",
        "               dp_shard=2  cp=1  tp=1",
        "zero           3 (parameters are sharded",
        "               over dp_shard)",
    ]
    assert fit("memory  rank 0: 3 GiB  rank 1: 4 GiB", 30) == "memory  rank 0: 3 GiB\n        rank 1: 4 GiB"
    assert fit("  some words that are long", 16) == "  some words\n    that are\n    long"


@pytest.mark.parametrize("width", [20, 60, 80, 120, None])
def test_no_word_is_lost_or_cut(width: int | None) -> None:
    text = f"{_PLAN}\n\ncheckpoint  /a/path/that/is/longer/than/a/narrow/terminal/and/stays/whole/in/any/case\n"
    fitted = fit(text, width)
    assert fitted.split() == text.split()
    if width is None or width == 120:
        assert fitted == text
    else:
        assert all(len(line) <= width or len(line.split()) == 1 for line in fitted.splitlines())
