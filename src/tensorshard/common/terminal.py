"""Text for a terminal of any width. Long lines are broken at words; the rest is indented to where their text begins."""

import re
import shutil
import textwrap
from typing import TextIO

# A name, a gap of two spaces or more, then the text about it.
_NAMED = re.compile(r"\s*\S+( \S+)*?\s{2,}(?=\S)")
_LONGEST_NAME = 32
_GAP = re.compile(r"\s{2,}")
_SINGLE = re.compile(r"(?<=\S) (?=\S)")
_STAND_IN = "\0"  # replaces a space at which a line must not be broken


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal that `stream` writes to; None if it is a file or a pipe, for lines of any length."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def fit(text: str, width: int | None) -> str:
    """`text`, its lines broken at words to at most `width` columns. Longer words, such as paths, stay whole.

    The rest of a line that begins with a name and a gap of two spaces or more (``optimizer      AdamW``) goes under the
    text after the gap. The rest of any other line is indented by two columns more than its beginning. If there are more
    gaps (``rank 0: 3 GiB  rank 1: 4 GiB``), lines are broken at these, unless the pieces are too long.
    """
    if width is None:
        return text
    return "\n".join(_fit_line(line, width) for line in text.split("\n"))


def _fit_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    named = _NAMED.match(line)
    indent = len(line) - len(line.lstrip()) + 2
    if named is not None and named.end() <= min(_LONGEST_NAME, width // 2):
        indent = named.end()
    parts = _GAP.split(line[indent:].strip())
    if len(parts) > 1 and max(map(len, parts)) <= width - indent:
        line = line[:indent] + _SINGLE.sub(_STAND_IN, line[indent:])
    filled = textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, tabsize=4
    )
    return filled.replace(_STAND_IN, " ")
