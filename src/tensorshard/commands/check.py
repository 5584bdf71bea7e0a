"""``tensorshard check``: does the installation work, and how fast is this machine?"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tensorshard.commands.arguments import HelpFormat
from tensorshard.commands.env import describe_machine

_EPILOG = """\
examples:
  tensorshard check
      in less than a minute: versions, a step of two ranks against one process, and measured rates
  tensorshard estimate my_config.py --world-size 2 --gpu this-machine
      a step's time with the rates that were measured
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``check`` to the command line."""
    parser = commands.add_parser(
        "check",
        help="check the installation and measure this machine, for estimates of time",
        description="Prints versions and backends, compares steps of two ranks with one process, and measures matrix "
        "products, memory, collectives and the disk. What it finds is kept as the hardware 'this-machine' of "
        "estimates. Exit status 1 means that something does not work.",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.set_defaults(command=run, parser=parser, words=None)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        LaunchError, WorkerFailedError: two ranks do not work together, or compute other results than one process.
    """
    from tensorshard.predict.hardware import rates_from_json, save_measured
    from tensorshard.trainer.launch.launcher import World, launch, visible_gpus
    from tensorshard.trainer.machine_check import describe
    from tensorshard.trainer.machine_check import run as run_check

    print(describe_machine(sys.stdout), flush=True)
    gpus = visible_gpus()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tensorshard-check-") as folder:
        results = Path(folder) / "results.json"
        launch(run_check, (str(results),), World(nproc=min(gpus, 2) or 2))
        measured = json.loads(results.read_text())
    rates = rates_from_json(measured["rates"])
    print(describe(rates, time.monotonic() - begin))
    for note in measured["notes"]:
        print(note)
    path = save_measured(measured["memory"], measured["context"], rates, "measured by 'tensorshard check'")
    if path is None:
        print("the rates are not kept, as there is no cache folder (TENSORSHARD_CACHE)")
    else:
        print(f"kept in {path}; use it with --gpu this-machine")
    return 0
