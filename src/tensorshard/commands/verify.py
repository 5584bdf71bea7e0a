"""``tensorshard verify``: does a config's plan compute what one device would?"""

import argparse
import json
from pathlib import Path

from tensorshard.commands.arguments import (
    HelpFormat,
    add_allow,
    add_config_and_world_size,
    check_world_size,
    config_and_overrides,
    find_own_modules,
)
from tensorshard.common.words import fit
from tensorshard.config import ConfigError

_WIDTH = 120
_SAMPLES = 64  # at most so many of the training data are read

_EPILOG = """\
examples:
  tensorshard verify my_config.py
      the config's plan, on the fewest CPU processes that it can have
  tensorshard verify my_config.py train.plan.tp=2 train.plan.zero=3 --world-size 4
      another plan, on four processes
  tensorshard verify my_config.py train.plan=plan.yaml --html page.html --json verified.json
      the plan of a file; also a page, and what a script can read
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``verify`` to the command line."""
    parser = commands.add_parser(
        "verify",
        help="check that a config's plan trains exactly as one device would, on CPU processes",
        description="Trains a small version of CONFIG's model on CPU processes under its plan, and in one process. "
        "Compares losses, gradients, weights, buffers and optimizer states. Exit status 1 means that something "
        "differs; then the culprit is named. Neither weights in files nor the run's directory are touched.",
        usage="tensorshard verify CONFIG [KEY=VALUE ...] [options]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    add_config_and_world_size(parser)
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps that are compared (default: 3)")
    parser.add_argument("--whole", action="store_true", help="the model as it is, not a small version of it")
    parser.add_argument("--html", metavar="FILE", help="also write a page")
    parser.add_argument("--json", metavar="FILE", help="also write what was found, and the hash, for programs")
    add_allow(parser)
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: the config or an option makes no sense, the plan does not suit the model, or a file cannot be
            written.
    """
    if not [word for word in args.words if "=" not in word]:
        raise ConfigError(
            "no config was given, whose plan would be verified; name one, as in 'tensorshard verify my_config.py', or "
            "a shipped one, as in 'tensorshard verify quickstart'"
        )
    world_size = None if args.world_size is None else check_world_size(args.world_size)
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}; it must be 1 or more")
    for option in ("html", "json"):
        path = getattr(args, option)
        if path is not None and not (Path(path).parent.is_dir() and not Path(path).is_dir()):
            raise ConfigError(f"--{option} {path}: it cannot be written, as its folder is not there or it is a folder")
    find_own_modules()
    from tensorshard.trainer.initial_model import RunParts
    from tensorshard.trainer.planned_run import read_config
    from tensorshard.verify import verify

    source, overrides = config_and_overrides(args.words)
    read = read_config(source, overrides, allow=args.allow)
    if read.request.searches:
        raise ConfigError(
            "'auto' leaves the plan to a search, and one plan is verified; 'tensorshard plan --save plan.yaml' searches"
        )
    parts = RunParts(read.config)
    settings = parts.settings
    try:
        inputs, targets = parts.batch(settings.global_batch_size if args.whole else _SAMPLES)
        verification = verify(
            plan=settings.plan,
            inputs=inputs,
            targets=targets,
            world_size=world_size,
            steps=args.steps,
            seed=settings.seed,
            shrink=not args.whole,
            **parts.arguments(),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    lines = [fit(verification.describe(), _WIDTH)]
    try:
        if args.html is not None:
            verification.to_html(args.html)
            lines.append(f"page         {args.html}")
        if args.json is not None:
            Path(args.json).write_text(
                json.dumps(verification.to_dict(), indent=2, default=str) + "\n", encoding="utf-8"
            )
            lines.append(f"for programs {args.json}")
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error}") from error
    finally:
        print("\n".join(lines))
    return 0 if verification else 1
