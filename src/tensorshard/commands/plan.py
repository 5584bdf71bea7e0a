"""``tensorshard plan``: the best plans for a config and some hardware, and why."""

import argparse
import os

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
from tensorshard.config import ConfigError

MEASURED = 3
"""How many plans ``--measure`` runs, unless it says how many."""

_EPILOG = """\
examples:
  tensorshard plan my_config.py --world-size 64 --gpu h100 --save plan.yaml
      the best plans for 64 H100, and a file that the next line trains with
  tensorshard train my_config.py train.plan=plan.yaml
      as the file says, on as many processes as it is for
  tensorshard plan my_config.py --world-size 4 --measure
      the best three plans for this machine really take two steps; the fastest is chosen
  tensorshard plan my_config.py train.plan.tp=8 --world-size 64 --gpu a100-80 --within 2m
      the best that two minutes find with tp=8; every field of train.plan that is set here stays as it is
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``plan`` to the command line."""
    parser = commands.add_parser(
        "plan",
        help="find the best plans for a config, without the hardware, and say why",
        description="Finds the best plans for CONFIG on this number of ranks, at the same global batch. Prints their "
        "time and memory, and why the others were not chosen. Exit status 1 means that none fits.",
        usage="tensorshard plan [CONFIG] [KEY=VALUE ...] --world-size N [options]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    add_config_and_world_size(parser)
    parser.add_argument("--gpu", metavar="NAME", help="the device, such as a100-80, h100 (default: this machine)")
    parser.add_argument("--memory", metavar="SIZE", help="what a rank may take, such as 70GiB (default: all)")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step (default: the config's)")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many plans to show (default: 5)")
    parser.add_argument(
        "--measure",
        type=int,
        nargs="?",
        const=MEASURED,
        default=0,
        metavar="N",
        help=f"take two steps under each of the best N plans (default: {MEASURED}) here; the fastest comes first",
    )
    add_within(parser)
    parser.add_argument("--save", metavar="FILE", help="write the best plan as YAML, for train.plan=FILE")
    parser.add_argument("--html", metavar="FILE", help="also write a page")
    add_allow(parser)
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: the config or an option makes no sense, or a file cannot be written.
        LaunchError: this machine cannot run the ranks of `--measure`.
    """
    world_size = check_world_size(args.world_size)
    for option in ("save", "html"):
        path = getattr(args, option)
        if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
            raise ConfigError(f"--{option} {path}: there is no folder {os.path.dirname(path)}")
    if args.measure < 0:
        raise ConfigError(f"--measure {args.measure}: the number of plans to run must be at least 1")
    try:
        until = end_of(args.within)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if args.measure and args.gpu is not None:
        raise ConfigError(f"--measure runs plans on this machine, and --gpu {args.gpu} names another; leave one out")
    find_own_modules()
    from dataclasses import replace

    from tensorshard.common.progress import progress
    from tensorshard.predict.search.find_plans import NothingFitsError
    from tensorshard.trainer.planned_run import plans_of_run, read_config

    source, overrides = config_and_overrides(args.words)
    read = read_config(source, overrides, allow=args.allow)
    try:
        with progress(f"looking for plans of {source} on {world_size} ranks", until=until, is_command=True):
            search = plans_of_run(
                read.config,
                replace(read.request, automatic=not read.request.free),
                world_size,
                hardware=args.gpu,
                memory=args.memory,
                global_batch=args.global_batch,
                top=max(args.top, args.measure),
            )
    except ConfigError as error:
        if not isinstance(error.__cause__, NothingFitsError):
            raise
        print(error.__cause__.describe())
        return 1
    if args.measure:
        from tensorshard.trainer.measured_plans import measure_plans

        search = measure_plans(search, read.config, args.measure)
    lines = [search.describe()]
    try:  # before anything is printed: the reader may be `head`, at whose end this process ends
        if args.html is not None:
            search.to_html(args.html)
            lines.append(f"\npage  {args.html}")
        if args.save is not None:
            search.best.plan.to_yaml(args.save)
            batch = "" if args.global_batch is None else f" train.global_batch_size={args.global_batch}"
            lines.append(f"\nplan  {args.save}; on {world_size} processes it is run by")
            lines.append(f"      tensorshard train {source} train.plan={args.save}{batch}")
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error}") from error
    finally:
        print("\n".join(lines))
    return 0
