"""What ``python -m benchmarks`` can run: every module of `benchmarks.suites` that has a ``SUITE``."""

import argparse
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from benchmarks import suites


@dataclass(frozen=True)
class Suite:
    """One benchmark.

    Args:
        name: what is typed after ``python -m benchmarks``; also the results file's first word.
        summary: one line for ``--help``.
        add_arguments: adds the suite's own options to its parser.
        run: runs it and returns the exit status.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def positive_int(text: str) -> int:
    """An option's value that has to be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def find_suites() -> dict[str, Suite]:
    """Every suite by its name, in alphabetical order."""
    modules = (import_module(f"{suites.__name__}.{info.name}") for info in pkgutil.iter_modules(suites.__path__))
    all_suites = (module.SUITE for module in modules if hasattr(module, "SUITE"))
    return {suite.name: suite for suite in sorted(all_suites, key=lambda suite: suite.name)}
