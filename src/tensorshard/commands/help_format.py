"""How the commands print their help."""

import argparse
import re
import textwrap

_COMMAND = re.compile(r"\s*(tensorshard|torchrun) ")


class HelpFormat(argparse.HelpFormatter):
    """Keeps the lines of descriptions and examples. Breaks lines that are wider than the terminal, between words."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_broken(f"{indent}{line}", width) for line in text.splitlines())


def _broken(line: str, width: int) -> str:
    """`line`, broken into lines of at most `width` columns. A command gets the backslashes that a shell needs."""
    own = line[: len(line) - len(line.lstrip())]
    if len(line) <= width:
        return line
    if _COMMAND.match(line):
        return " \\\n".join(_lines(line, width - 2, f"{own}  "))
    return "\n".join(_lines(line, width, own))


def _lines(line: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
