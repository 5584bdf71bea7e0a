"""Arguments and texts that several commands share."""

import argparse
import os
import re
import sys
import textwrap
import time
from collections.abc import Sequence

from tensorshard.config import ConfigError


def add_allow(parser: argparse.ArgumentParser) -> None:
    """Adds ``--allow MODULE``, which may be given several times."""
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module that a YAML config may call, such as your own; "
        "tensorshard, torch.nn, torch.optim, torchmetrics and transformers are allowed",
    )


def add_within(parser: argparse.ArgumentParser) -> None:
    """Adds ``--within TIME``."""
    parser.add_argument("--within", metavar="TIME", help="such as 2m: end then with what was found, as Ctrl-C does")


def end_of(within: str | None) -> float | None:
    """When what began now has to end, by ``time.monotonic``; None for never.

    Raises:
        ValueError: `within` is no time.
    """
    from tensorshard.plan.field_checks import size_in_seconds

    return None if within is None else time.monotonic() + size_in_seconds("--within", within)


def find_own_modules() -> None:
    """Makes modules in the working directory importable, as ``python -m`` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def config_and_overrides(words: Sequence[str]) -> tuple[str, list[str]]:
    """The config, by default the quickstart, and its overrides.

    Raises:
        ConfigError: the words name several configs.
    """
    overrides = [word for word in words if "=" in word]
    configs = [word for word in words if "=" not in word]
    if len(configs) > 1:
        raise ConfigError(f"one config at a time, not {' and '.join(configs)}; overrides are written KEY=VALUE")
    return (configs[0] if configs else "quickstart"), overrides


def add_config_and_world_size(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the config with its overrides, and for the number of ranks."""
    parser.add_argument("words", nargs="*", metavar="CONFIG KEY=VALUE", help="as for 'tensorshard train'")
    parser.add_argument("--world-size", type=int, metavar="N", help="the number of ranks")


def check_world_size(world_size: int | None) -> int:
    """The number of ranks that was given.

    Raises:
        ConfigError: none was given, or a number below 1.
    """
    if world_size is None or world_size < 1:
        given = "was not given" if world_size is None else f"is {world_size}"
        raise ConfigError(f"--world-size {given}; it must be the number of ranks, 1 or more, as in --world-size 8")
    return world_size


_COMMAND = re.compile(r"\s*(tensorshard|torchrun) ")


class HelpFormat(argparse.HelpFormatter):
    """Keeps the lines of descriptions and examples. Breaks lines that are wider than the terminal, between words."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_broken(f"{indent}{line}", width) for line in text.splitlines())


def _broken(line: str, width: int) -> str:
    """`line`, broken into lines of at most `width` columns. A command gets the backslashes that a shell needs."""
    indent = line[: len(line) - len(line.lstrip())]
    if len(line) <= width:
        return line
    if _COMMAND.match(line):
        return " \\\n".join(_lines(line, width - 2, f"{indent}  "))
    return "\n".join(_lines(line, width, indent))


def _lines(line: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
