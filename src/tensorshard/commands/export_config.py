"""``tensorshard export-config``: a Plan, or a config of ours, as a config of another program."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tensorshard.commands.arguments import HelpFormat
from tensorshard.config import ConfigError

_EPILOG = """\
examples:
  tensorshard export-config plan.yaml --to deepspeed --output ds_config.json
  tensorshard export-config runs/quickstart-1/config.yaml --to torchtitan
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``export-config`` to the command line."""
    from tensorshard.foreign_configs import PROGRAMS

    parser = commands.add_parser(
        "export-config",
        help="write a Plan as DeepSpeed's, Accelerate's or torchtitan's config",
        description="Writes PLAN, the YAML of a Plan or of a run, as the config of another program. What the program "
        "cannot do is an error.",
        usage="tensorshard export-config PLAN --to PROGRAM [--output FILE]",
        epilog=_EPILOG,
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="PLAN", help="a YAML file")
    parser.add_argument("--to", metavar="PROGRAM", help=" or ".join(PROGRAMS))
    parser.add_argument("--output", metavar="FILE", help="where to write it; without it, it is printed")
    parser.set_defaults(command=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ConfigError: there is no such file, it is no Plan, or the program cannot do what it asks.
    """
    import yaml

    from tensorshard.foreign_configs import export
    from tensorshard.foreign_configs.ledger import flat
    from tensorshard.plan import Plan

    if len(args.words) != 1:
        raise ConfigError(f"one PLAN is needed, the YAML of a Plan or of a run; {len(args.words)} were given")
    if args.to is None:
        raise ConfigError("--to was not given; it is deepspeed, accelerate or torchtitan")
    try:
        values = yaml.safe_load(Path(args.words[0]).read_text(encoding="utf-8"))
        settings: dict[str, Any] = {}
        if isinstance(values, dict) and "train" in values:
            settings = {".".join(key): value for key, value in flat(values)}
            values = {key: value for key, value in values["train"]["plan"].items() if key != "_target_"}
            if isinstance(values.get("offload"), dict):
                values["offload"] = {key: v for key, v in values["offload"].items() if key != "_target_"}
        config = export(args.to, asdict(Plan.from_dict(values or {})), settings)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"{args.words[0]}: {error}") from error
    text = {"deepspeed": _json, "accelerate": _yaml, "torchtitan": _toml}[args.to](config)
    if args.output is None:
        print(text, end="")
    else:
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {args.output}: it cannot be written ({error})") from error
    return 0


def _json(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"


def _yaml(config: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(config, sort_keys=False)


def _toml(config: dict[str, Any]) -> str:
    """Two levels of TOML, whose values are spelt as JSON's."""
    sections = []
    for name, values in config.items():
        sections.append("\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]))
    return "\n\n".join(sections) + "\n"
