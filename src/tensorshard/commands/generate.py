"""``tensorshard generate``: text from a trained language model."""

import argparse
from dataclasses import fields
from pathlib import Path

from tensorshard.commands.arguments import HelpFormat, add_allow, find_own_modules
from tensorshard.config import ConfigError

_EPILOG = """\
examples:
  tensorshard generate runs/quickstart-1 "def main("
      with the newest checkpoint of a run
  tensorshard generate path/to/llama "Once upon a time" --max-new-tokens 50 --temperature 0 --nproc 2
      with a model of Hugging Face's, split over two processes
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``generate`` to the command line."""
    parser = commands.add_parser(
        "generate",
        help="continue a text with a trained language model",
        description="Continues PROMPT with MODEL: a run, one of its checkpoints, or a directory of Hugging Face's.",
        usage="tensorshard generate MODEL PROMPT [options]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="MODEL PROMPT", help="the model, and the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="tokens to add (default: 100)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token each time (default: 0.8)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens only (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random draws (default: 0)")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.json or its directory, or 'bytes' (default: the model's own)",
    )
    add_allow(parser)
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes to split it over (default: 1)")
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError, LaunchError: the model cannot be read, an option makes no sense, or processes cannot be started.
        WorkerFailedError: a process failed.
    """
    find_own_modules()
    from tensorshard.trainer.launch.launcher import World, launch
    from tensorshard.trainer.text import TextSettings, find_model, print_text

    if len(args.words) != 2:
        raise ConfigError(f"generate takes a model and a prompt, and was given {' '.join(args.words) or 'nothing'}")
    source, prompt = args.words
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # stand for bytes that are not UTF-8
        raise ConfigError("the prompt is not UTF-8 text; set the terminal's encoding to UTF-8")
    world = World(nproc=args.nproc)
    names = [field.name for field in fields(TextSettings) if field.name != "prompt"]
    settings = TextSettings(prompt, **{name: getattr(args, name) for name in names})
    find_model(Path(source), args.allow)  # errors are raised here, before processes are started
    if world.nproc == 1:
        print_text(source, settings, args.allow)
    else:
        launch(print_text, (source, settings, args.allow), world)
    return 0
