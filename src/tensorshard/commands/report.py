"""``tensorshard report``: the results of runs, as a table and as a page."""

import argparse
import sys
from pathlib import Path

from tensorshard.commands.arguments import HelpFormat
from tensorshard.common.words import terminal_width
from tensorshard.config import ConfigError

_EPILOG = """\
examples:
  tensorshard report runs/quickstart-1
      one run, also while it is still going
  tensorshard report runs/quickstart-1 --html page.html
      also curves, the memory of every rank, the plan and the mesh, as one file that needs no network
  tensorshard report runs/quickstart-1 runs/quickstart-2 --html page.html
      several side by side, and how their configs differ
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``report`` to the command line."""
    parser = commands.add_parser(
        "report",
        help="show what became of a run, or of several side by side",
        description="Shows losses, speed, the memory of every rank, the plan, and the estimate against what was\n"
        "measured, of the run in each folder RUN. Nothing in it is run or changed.",
        usage="tensorshard report RUN [RUN ...] [--html FILE]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="RUN", help="the folder of a run, such as runs/quickstart-1")
    parser.add_argument("--html", metavar="FILE", help="also write a page")
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: a folder is not a run's, or the page cannot be written.
    """
    from tensorshard.report.describe import describe
    from tensorshard.report.read_run import read_runs

    runs = read_runs(args.words)
    blocks = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(describe(runs, terminal_width(sys.stdout), blocks=blocks))
    if args.html is not None:
        from tensorshard.report.run_page import run_page

        try:
            Path(args.html).write_text(run_page(runs), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {args.html}: it cannot be written ({error})") from error
        print(f"\npage  {args.html}")
    return 0
