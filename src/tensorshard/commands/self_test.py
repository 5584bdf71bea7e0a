"""``tensorshard test``: is the installation right?"""

import argparse
import time

from tensorshard.commands.arguments import HelpFormat


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``test`` to the command line."""
    parser = commands.add_parser(
        "test",
        help="train a few steps under several plans on this machine and compare them with one process",
        description="Is the installation right? Trains a small model for a few steps under several plans, on all "
        "visible GPUs or two CPU processes, and compares each with one process. Takes under a minute.",
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes (default: one for each visible GPU, or 2 if there is none)",
    )
    parser.set_defaults(command=run, parser=parser, words=None)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        LaunchError: the processes cannot be started.
        WorkerFailedError: a plan is wrong, or a process failed.
    """
    from tensorshard.trainer.launch.launcher import World, launch, visible_gpus
    from tensorshard.trainer.self_test import run as run_plans

    begin = time.monotonic()
    launch(run_plans, (), World(nproc=(visible_gpus() or 2) if args.nproc is None else args.nproc))
    print(f"all plans compute what one process computes ({time.monotonic() - begin:.0f} s)")
    return 0
