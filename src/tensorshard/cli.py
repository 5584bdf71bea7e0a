"""The ``tensorshard`` command: finds the subcommand and turns its errors into messages and exit codes."""

import argparse
import difflib
import sys
from collections.abc import Sequence

import tensorshard
from tensorshard.commands import (
    check,
    checkpoint,
    data,
    env,
    estimate,
    export,
    export_config,
    generate,
    import_checkpoint,
    import_config,
    plan,
    report,
    self_test,
    train,
    verify,
)
from tensorshard.config import ConfigError
from tensorshard.trainer.launch.launch_errors import LaunchError, LaunchInterrupted, WorkerFailedError
from tensorshard.trainer.launch.worker import INTERRUPTED, USAGE_ERROR, hand_on_mistake, print_mistake


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (without the program's name) and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tensorshard",
        description=tensorshard.__doc__,
        epilog="tensorshard COMMAND --help shows a command's options and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tensorshard {tensorshard.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (
        train,
        report,
        estimate,
        plan,
        verify,
        generate,
        export,
        import_config,
        export_config,
        import_checkpoint,
        checkpoint,
        data,
        self_test,
        check,
        env,
    ):
        command.add_parser(commands)
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help()
        return 0
    args, rest = parser.parse_known_args(argv)
    for word in rest:
        if word.startswith("-"):
            args.parser.error(_unknown_option(args.parser, word))
    if args.words is None:  # a command that only takes options
        if rest:
            args.parser.error(f"unexpected {rest[0]!r}; this command takes no arguments")
    else:
        # argparse stops collecting the words at the first option. The words after that are left over.
        args.words = [*args.words, *rest]
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        return args.command(args)
    except (ConfigError, LaunchError) as error:
        hand_on_mistake(str(error))
        print_mistake(str(error))
        return USAGE_ERROR
    except WorkerFailedError as error:
        if error.mistake:
            print_mistake(error.mistake)
        else:
            print(f"tensorshard: {error}", file=sys.stderr)
        _print_ending(error.ending)
        return USAGE_ERROR if error.mistake else 1
    except LaunchInterrupted as error:
        _print_ending(error.ending)
        return 128 + error.signal
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_ending(ending: str) -> None:
    if ending:
        print(f"\n{ending}", file=sys.stderr)


def _unknown_option(parser: argparse.ArgumentParser, word: str) -> str:
    name = word.partition("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "")


if __name__ == "__main__":
    sys.exit(main())
