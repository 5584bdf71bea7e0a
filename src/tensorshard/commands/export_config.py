"""``tensorshard export-config``: a Plan, or a config of ours, as a config of another program."""

import argparse
import json
import sys
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
        "cannot do is an error; what its config has no place for is named on the standard error.",
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
        settings: dict[str, Any] = {}  # of the run
        if isinstance(values, dict) and "train" in values:
            settings = {".".join(key): value for key, value in flat(values)}
            values = {key: value for key, value in values["train"]["plan"].items() if key != "_target_"}
            if isinstance(values.get("offload"), dict):
                values["offload"] = {key: v for key, v in values["offload"].items() if key != "_target_"}
        plan, settings = _Read(asdict(Plan.from_dict(values or {}))), _Read(settings)
        config = export(args.to, plan, settings)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"{args.words[0]}: {error}") from error
    defaults = asdict(Plan())
    left = [f"{key}={value}" for key, value in plan.items() if key not in plan.read and value != defaults[key]]
    left += [f"{key}={value}" for key, value in settings.items() if key not in settings.read and _matters(key)]
    if left:
        print(f"not in this config, so set them in {args.to}'s script: {', '.join(left)}", file=sys.stderr)
    text = {"deepspeed": _json, "accelerate": _yaml, "torchtitan": _toml}[args.to](config)
    if args.output is None:
        print(text, end="")
    else:
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {args.output}: it cannot be written ({error})") from error
    return 0


class _Read(dict[str, Any]):
    """A dictionary that knows which keys were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def _matters(key: str) -> bool:
    """Whether this key of a run's config says what is computed, and other programs have a place for it."""
    return key in ("train.global_batch_size", "train.steps") or (
        key.startswith(("optimizer.", "scheduler.")) and not key.endswith("_partial_")
    )


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
