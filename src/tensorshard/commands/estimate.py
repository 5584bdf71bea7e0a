"""``tensorshard estimate``: does a config fit the devices, and what takes the memory?"""

import argparse
import sys
from typing import TYPE_CHECKING

from tensorshard.commands.arguments import (
    HelpFormat,
    add_allow,
    add_config_and_world_size,
    add_within,
    check_world_size,
    config_and_overrides,
    end_of,
    find_own_modules,
)
from tensorshard.common.words import fit
from tensorshard.config import ConfigError

if TYPE_CHECKING:
    from tensorshard.predict.changes import Change

_WIDTH = 80

_EPILOG = """\
examples:
  tensorshard estimate quickstart --world-size 8
      the shipped config on eight ranks
  tensorshard estimate my_config.py train.plan.zero=3 train.plan.tp=8 --world-size 64 --gpu a100-80
      a plan for hardware that is not here
  tensorshard estimate my_config.py train.plan=plan.yaml --world-size 64 --gpu a100-80
      the plan of a file, such as 'tensorshard plan --save' writes
  tensorshard estimate my_config.py --world-size 4 --memory 24GiB
      exit status 1 where it does not fit
  tensorshard estimate hf model.config=DIR --world-size 16 --gpu a100-80
      the model of DIR's config.json; neither weights nor a tokenizer are needed
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``estimate`` to the command line."""
    parser = commands.add_parser(
        "estimate",
        help="say how much memory a config takes on each rank, without the hardware",
        description="Runs two steps of CONFIG on fake tensors, which have shapes and no memory, as each distinct "
        "rank in turn. Prints what each holds at its peak. Exit status 1 means that it does not fit.",
        usage="tensorshard estimate [CONFIG] [KEY=VALUE ...] --world-size N [options]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    add_config_and_world_size(parser)
    parser.add_argument("--gpu", metavar="NAME", help="the device, such as a100-80, h100 or rtx-4090")
    parser.add_argument("--memory", metavar="SIZE", help="what a device has, such as 24GiB; wins over --gpu")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="also write a page: memory over a step, the mesh, the schedule, the largest tensors",
    )
    add_within(parser)
    add_allow(parser)
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: the config or an option makes no sense, the plan does not suit the model, or the page cannot be
            written.
    """
    world_size = check_world_size(args.world_size)
    find_own_modules()
    from tensorshard.common.progress import TimeIsUp, progress
    from tensorshard.plan.field_checks import size_in_bytes
    from tensorshard.predict.hardware import find_hardware
    from tensorshard.trainer.estimated_run import EstimatedRun
    from tensorshard.trainer.planned_run import read_config

    source, overrides = config_and_overrides(args.words)
    read = read_config(source, overrides, allow=args.allow)
    if read.request.searches:
        raise ConfigError(
            "'auto' leaves the plan to a search, and an estimate is of one plan; 'tensorshard plan' searches, and "
            "estimates what it finds"
        )
    try:
        find_hardware(args.gpu)
        memory = None if args.memory is None else size_in_bytes("--memory", args.memory)
        until = end_of(args.within)
        with progress(f"estimating {source} on {world_size} ranks", until=until, is_command=True):
            asked = EstimatedRun(read.config, world_size, args.gpu)
            estimate = asked.estimate()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except TimeIsUp as error:
        raise ConfigError(
            f"--within {args.within}: the estimate had not ended by then; give it more time, or fewer pipeline stages, "
            f"each of which is run"
        ) from error
    print(fit(estimate.describe(memory), _WIDTH))
    if args.html is not None:
        try:
            estimate.to_html(args.html, memory)
        except OSError as error:
            raise ConfigError(f"--html {args.html}: it cannot be written ({error})") from error
        print(f"\npage       {args.html}")
    available = memory if memory is not None else estimate.hardware.memory if estimate.hardware is not None else None
    if available is None or estimate.fits(available):
        return 0
    sys.stdout.flush()
    with progress("looking for changes that make it fit", until=until, is_command=True):
        changes, ended = asked.changes_that_fit(estimate, available)
    print(fit(_advice(changes, available, ended), _WIDTH))
    return 1


def _advice(changes: "list[Change]", available: int, ended: str) -> str:
    if not changes or changes[0].needed > available:
        rest = f", and then {ended}" if ended else "; use more ranks, or devices with more memory"
        nearest = ["what needs the least:", *(change.describe() for change in changes)] if changes else []
        return "\n".join([f"\nno change of the plan that was tried makes it fit{rest}", *nearest])
    title = "\nwhat makes it fit, the cheapest first (as overrides train.plan.NAME=VALUE), and the memory then:"
    return "\n".join([title, *(change.describe() for change in changes)])
