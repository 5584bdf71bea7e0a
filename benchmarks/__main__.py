"""``python -m benchmarks NAME``."""

import argparse
import sys

from benchmarks import tables
from benchmarks.harness.ranks import RankError
from benchmarks.harness.statistics import LossMismatchError
from benchmarks.registry import find_suites


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of tensorshard.")
    commands = parser.add_subparsers(required=True, metavar="NAME")
    for suite in (*find_suites().values(), tables.COMMAND):
        subparser = commands.add_parser(suite.name, help=suite.summary, description=suite.summary)
        suite.add_arguments(subparser)
        subparser.set_defaults(run=suite.run)
    arguments = parser.parse_args()
    try:
        return arguments.run(arguments)
    except (LossMismatchError, RankError, tables.MarkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
