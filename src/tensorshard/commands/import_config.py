"""``tensorshard import``: another program's config as ours, with a ledger of every key."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorshard.commands.arguments import HelpFormat
from tensorshard.common.words import terminal_width
from tensorshard.config import ConfigError

_EPILOG = """\
examples:
  tensorshard import ds_config.json --world-size 8 --output imported.yaml
      the ledger on the terminal, and a config for 'tensorshard train imported.yaml'
  tensorshard import ds_config.json optimizer.params.lr=2e-5 --without offload_optimizer
      with a value that the file leaves to "auto", and without a key that is refused
  tensorshard import pretrain_gpt.sh --from megatron TP=2
      the arguments of a launch script, with a variable set
  tensorshard import ds_config.json --check model.pretrained=DIR --world-size 8
      also compares with the world at hand, and estimates the memory
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``import`` to the command line."""
    from tensorshard.foreign_configs import SOURCES

    parser = commands.add_parser(
        "import",
        help="read another program's config, and say what becomes of each key",
        description="Reads FILE, a config of another program, and prints what becomes of each key: translated, "
        "different here, not needed here, or refused. Writes a config for 'tensorshard train'. Exit status 1 means "
        "that a key was refused.",
        usage="tensorshard import FILE [KEY=VALUE ...] [options]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="FILE KEY=VALUE", help="the file, and values in place of its own")
    parser.add_argument(
        "--from", dest="source", metavar="PROGRAM", help=f"whose config it is: {', '.join(SOURCES)}; guessed otherwise"
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="for how many processes")
    parser.add_argument(
        "--without", action="append", default=[], metavar="KEY", help="leave a key of theirs out, with all below it"
    )
    parser.add_argument("--output", metavar="FILE", help="where to write our config; without it, it is printed")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the devices at hand, and estimate the memory; KEY=VALUE of ours give the model and the data",
    )
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: there is no such file, it cannot be read, or nobody knows whose it is.
    """
    from tensorshard.foreign_configs import read_file

    path, given, ours = _file_and_values(args.words)
    try:
        ledger = read_file(path, args.source, world_size=args.world_size, given=given, without=args.without)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    print(f"{path}: {ledger.source}'s, {len(ledger.entries)} entries\n")
    print(ledger.describe(max(60, terminal_width(sys.stdout) or 100)))
    if ledger.refused:
        keys = " ".join(f"--without {entry.key!r}" for entry in ledger.refused[:3] if entry.value != "(implied)")
        more = " ..." if len(ledger.refused) > 3 else ""
        print(
            f"\n{len(ledger.refused)} of the keys {'is' if len(ledger.refused) == 1 else 'are'} refused, so no config "
            f"was written; change the file, give values "
            f"as KEY=VALUE, or leave keys out: {keys}{more}",
            file=sys.stderr,
        )
        return 1
    text = _yaml(ledger, path)
    if args.output is None:
        print(f"\n{text}")
    else:
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {args.output}: it cannot be written ({error})") from error
    _say_what_is_left(text, args.output, ledger.world_size)
    return _check(args, text, ours, ledger.world_size) if args.check else 0


_OURS = ("model.pretrained", "text.files", "text.tokenizer")


def _file_and_values(words: Iterable[str]) -> tuple[Path, dict[str, Any], list[str]]:
    import yaml

    files = [word for word in words if "=" not in word]
    if len(files) != 1:
        raise ConfigError(f"one file at a time, not {' and '.join(files) or 'none'}; values are written KEY=VALUE")
    path = Path(files[0])
    if not path.is_file():
        raise ConfigError(f"there is no file {files[0]!r} here")
    given, ours = {}, []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in _OURS:
            ours.append(word)
        elif equals:
            try:
                given[key] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise ConfigError(f"the value in {word!r} is not YAML") from error
            if isinstance(given[key], str):
                given[key] = _number(given[key])
    return path, given, ours


def _number(text: str) -> Any:
    """`text` as the number that it spells, such as 2e-5, which YAML reads as text."""
    try:
        return float(text)
    except ValueError:
        return text


def _yaml(ledger: Any, path: Path) -> str:
    """Our config as YAML: the shipped one for language models, with the ledger's settings."""
    from omegaconf import OmegaConf, open_dict

    from tensorshard.config import get_config

    config = get_config("hf.py")
    with open_dict(config):
        config.text.files = config.model.pretrained = "???"
        config.train.plan = {"_target_": "tensorshard.plan.plan.Plan", **ledger.plan}
        names = {key for key in ledger.settings if key.startswith("optimizer.")}
        if names:
            config.optimizer = {"_target_": "torch.optim.AdamW", "_partial_": True}
        if any(key.startswith("scheduler.") for key in ledger.settings):
            config.scheduler = {"_target_": "tensorshard.trainer.schedulers.warmup_decay", "_partial_": True}
        elif names:
            config.scheduler = {"_target_": "tensorshard.trainer.schedulers.constant", "_partial_": True}
        for key, value in ledger.settings.items():
            if not key.startswith("train.plan."):
                OmegaConf.update(config, key, value, merge=False, force_add=True)
        config.train.name = path.stem
    return OmegaConf.to_yaml(config)


def _say_what_is_left(text: str, output: str | None, world_size: int | None) -> None:
    import yaml

    from tensorshard.foreign_configs.ledger import flat

    left = [".".join(key) for key, value in flat(yaml.safe_load(text)) if value == "???"]
    what = {"model.pretrained": "DIR", "text.files": "'texts/*.txt'", "train.steps": "N", "optimizer.lr": "RATE"}
    words = " ".join(f"{key}={what.get(key, 'VALUE')}" for key in left)
    ranks = f" --nproc {world_size}" if world_size and world_size <= 8 else ""  # more are on several hosts
    print(f"still to be filled in: {', '.join(left)}\n  tensorshard train {output or 'imported.yaml'} {words}{ranks}")


def _check(args: argparse.Namespace, text: str, ours: list[str], world_size: int | None) -> int:
    """Compares with the devices at hand, and estimates."""
    import os
    import tempfile

    import torch

    from tensorshard.commands import estimate
    from tensorshard.plan import Plan

    device_count = torch.cuda.device_count() or int(os.environ.get("WORLD_SIZE", "1"))
    kind = "GPUs" if torch.cuda.is_available() else "processes on the CPU"
    print(f"\ncheck      {device_count} {kind} here; the config is for {world_size or 'any number of'} processes")
    import yaml

    fields = {key: value for key, value in yaml.safe_load(text)["train"]["plan"].items() if key != "_target_"}
    try:
        print(f"plan       {Plan(**fields).resolve(world_size or device_count).in_short()}")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not ours:
        print("estimate   give model.pretrained=DIR and text.files='texts/*.txt' for one")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(text, encoding="utf-8")
        left = ["train.steps=100"] if "steps: ???" in text else []
        words = [str(file), *ours, *left]
        ranks = world_size or device_count
        return estimate.run(
            argparse.Namespace(words=words, world_size=ranks, gpu=None, memory=None, html=None, allow=[])
        )
