"""The sources: reads a file, finds out whose config it is, and follows that program's table.

Also here: what an import gives: our settings, the ledger, and what is still to be filled in.
"""

import difflib
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorshard.common.paths import read_utf8
from tensorshard.foreign_configs import (
    accelerate,
    deepspeed,
    libai,
    lightning,
    megatron,
    nemo,
    paddle,
    python_files,
    shell,
    torchtitan,
    torchtune,
    trainers,
)
from tensorshard.foreign_configs.ledger import (
    DIFFERENT,
    IMPLIED,
    NOT_NEEDED,
    REFUSED,
    TRANSLATED,
    Entry,
    Reading,
    flat,
    follow,
)
from tensorshard.foreign_configs.rules import refused

_PLAN = "train.plan."
_VERDICTS = (TRANSLATED, DIFFERENT, NOT_NEEDED, REFUSED)
Read = Callable[[Reading], None]

SOURCES: dict[str, Read] = {
    "deepspeed": deepspeed.read,
    "accelerate": accelerate.read,
    "fsdp": accelerate.read_fsdp,
    "megatron": megatron.read,
    "torchtitan": torchtitan.read,
    "torchtune": torchtune.read,
    "libai": libai.read,
    "paddle": paddle.read,
    "axolotl": lambda reading: trainers.read(reading, "axolotl"),
    "llama-factory": lambda reading: trainers.read(reading, "LLaMA-Factory"),
    "lightning": lightning.read,
    "nemo": nemo.read,
}
"""The programs whose configs are read."""

REFUSED_PROGRAMS = {
    "verl": "verl trains by reinforcement learning, with generation in the loop, which is not there",
    "transformers": "scripts of transformers' Trainer are not read; import the file of their --deepspeed by itself",
    "ms-swift": "ms-swift's scripts are not read; train.plan, optimizer and scheduler of 'tensorshard train hf' take their place",
    "nanotron": "nanotron's configs are not read; its parallelism section is train.plan's dp_shard, tp and pp",
    "picotron": "picotron's configs are not read; its distributed section is train.plan's dp_shard, tp, pp and cp",
    "litgpt": "LitGPT's configs are not read; train.plan, optimizer and scheduler of 'tensorshard train hf' take their place",
    "llm-foundry": "LLM Foundry's configs are not read; fsdp_config is train.plan.zero=3 with precision=bf16",
    "automodel": "NeMo Automodel's recipes name Python classes; distributed is train.plan's tp, cp, pp and dp_shard",
    "veomni": "VeOmni's configs are not read; train.accelerator is train.plan's dp_shard, tp and cp",
    "arctic": "Arctic Training's configs are not read; import its deepspeed section by itself",
    "gpt-neox": "GPT-NeoX builds its own models; import its zero_optimization and optimizer sections by themselves",
}
"""Programs whose configs are known and not read, with what to do instead."""

# Keys that only the config of this program has; the first program with one of them is it.
_SIGNS = (
    ("verl", "actor_rollout_ref"),
    ("veomni", "model.model_path&train.accelerator veomni model.config_path&data.train_path train.data_parallel_mode"),
    ("automodel", "recipe&step_scheduler step_scheduler recipe_args&distributed recipe&distributed"),
    ("torchtune", "tokenizer._component_ model._component_"),
    ("nanotron", "general.project&parallelism model.model_config&tokens data_stages&parallelism"),
    ("picotron", "distributed.tp_size&distributed.pp_engine"),
    ("litgpt", "checkpoint_dir&train.micro_batch_size out_dir&train.micro_batch_size"),
    ("llm-foundry", "max_duration&train_loader device_train_microbatch_size"),
    (
        "arctic",
        "micro_batch_size&data.sources micro_batch_size&deepspeed&model.name_or_path type&micro_batch_size&data",
    ),
    ("deepspeed", "zero_optimization train_micro_batch_size_per_gpu&bf16 train_batch_size&fp16"),
    ("accelerate", "compute_environment distributed_type"),
    ("torchtitan", "job.dump_folder parallelism.tensor_parallel_degree training.local_batch_size model.flavor"),
    ("paddle", "Global Engine Distributed Optimizer.name"),
    ("libai", "train.train_micro_batch_size train.dist"),
    (
        "nemo",
        "exp_manager model.tensor_model_parallel_size exp_manager&model.global_batch_size strategy._target_&trainer",
    ),
    ("axolotl", "base_model micro_batch_size&sequence_len datasets&adapter"),
    ("llama-factory", "finetuning_type template&dataset cutoff_len stage&model_name_or_path dist_config model_class"),
    (
        "lightning",
        "trainer.devices trainer.max_epochs trainer.accelerator trainer.max_steps accelerator&devices trainer",
    ),
    ("fsdp", "sharding_strategy fsdp_sharding_strategy fsdp_version reshard_after_forward fsdp_offload_params"),
    ("deepspeed", "train_micro_batch_size_per_gpu train_batch_size bf16.enabled fp16.enabled"),
    ("megatron", "tensor_model_parallel_size micro_batch_size&global_batch_size num_layers&hidden_size"),
)
_SCRIPTS = {
    "verl": r"-m\s+verl\.",
    "ms-swift": r"(?m)^[^#\n]*\b(swift|megatron)\s+(sft|pt|rlhf|export)\b",
    "transformers": r"--per[-_]device[-_]train[-_]batch[-_]size",
}
"""What only the launch scripts of these programs have."""
_GPT_NEOX = ("pipe_parallel_size", "model_parallel_size", "pipe-parallel-size", "model-parallel-size")


@dataclass(frozen=True)
class Ledger:
    """An imported config.

    Attributes:
        source: the program whose config it was.
        entries: one for each key of the file, and for each implied default that was written out.
        settings: dotted keys of our config and their values.
        world_size: the number of processes it is for, if the file or the caller said so.
    """

    source: str
    entries: tuple[Entry, ...]
    settings: dict[str, Any]
    world_size: int | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """The fields of the Plan."""
        return {key[len(_PLAN) :]: value for key, value in self.settings.items() if key.startswith(_PLAN)}

    @property
    def refused(self) -> list[Entry]:
        """The entries of keys that cannot be honoured."""
        return [entry for entry in self.entries if entry.verdict == REFUSED]

    def check(self) -> None:
        """Raises ValueError, with the reasons, if a key was refused."""
        if self.refused:
            lines = [f"{entry.key}={_short(entry.value)}: {entry.text}" for entry in self.refused]
            raise ValueError(f"this {self.source} config asks for what cannot be done here:\n  " + "\n  ".join(lines))

    def describe(self, width: int = 100) -> str:
        """The ledger as text: the keys of each verdict, in the file's order."""
        lines = []
        for verdict in _VERDICTS:
            entries = [entry for entry in self.entries if entry.verdict == verdict]
            if entries:
                lines.append(f"{verdict} ({len(entries)})")
            for entry in entries:
                given = IMPLIED if entry.value == IMPLIED else f"= {_short(entry.value)}"
                start = f"  {entry.key} {given}: "
                lines += textwrap.wrap(start + entry.text, width, subsequent_indent="      ", break_on_hyphens=False)
        return "\n".join(lines)


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:37] + "..."


_ROUNDED: dict[str, Callable[[float], int]] = {
    "axolotl": int,
    "llama-factory": math.ceil,
    "libai": math.ceil,
    "nemo": int,
}
"""How a part of the steps becomes warm-up steps, where it is not rounded to the nearest."""


def finish(reading: Reading, source: str) -> Ledger:
    """Settles what several keys say together, the batch sizes and the schedule, and closes the ledger."""
    if _check_degrees(reading):
        _settle_batches(reading)
    _settle_schedule(reading, source)
    _say_what_is_ours(reading)
    settings = {key: value for key, value in reading.settings.items() if not key.startswith(("batch.", "schedule."))}
    return Ledger(source, tuple(reading.entries), settings, reading.world_size)


def _check_degrees(reading: Reading) -> bool:
    """Whether the degrees fit the number of processes, if that is known."""
    degrees = {
        axis: reading.settings.get(f"{_PLAN}{axis}", 1) for axis in ("tp", "pp", "cp", "dp_replicate", "dp_shard")
    }
    degrees = {axis: degree for axis, degree in degrees.items() if isinstance(degree, int) and degree > 1}
    product, given = math.prod(degrees.values()), " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    if not reading.world_size or reading.world_size % product == 0:
        return True
    text = f"{given} need a multiple of {product} processes, and there are {reading.world_size}: change one of them, or"
    reading.add("degrees", IMPLIED, REFUSED, f"{text} --world-size")
    return False


def _say_what_is_ours(reading: Reading) -> None:
    """Says what a config for 'tensorshard train' takes where the file says nothing."""
    settings = reading.settings
    if not any(key.startswith("optimizer.") for key in settings):
        text = "the file has none: AdamW with lr=2e-5, after 10 steps of warm-up, is this package's; set optimizer.lr"
        reading.add("optimizer", IMPLIED, DIFFERENT, text)
    if not any(key.startswith("batch.") for key in settings):
        reading.add("batch sizes", IMPLIED, DIFFERENT, "the file has none: train.global_batch_size=8 is this package's")
    if "train.steps" not in settings:
        reading.add("steps", IMPLIED, DIFFERENT, "the file has none: train.steps=100 is this package's; set it")
    if "text.context_length" not in settings:
        text = "the file has none: samples of text.context_length=256 tokens are this package's; set it"
        reading.add("length of samples", IMPLIED, DIFFERENT, text)


def _settle_batches(reading: Reading) -> None:
    """Writes out samples a step and micro-batches; of samples a rank, micro-batches and samples a step, two suffice."""
    settings = reading.settings
    micro, parts, global_batch = (settings.get(f"batch.{name}") for name in ("micro", "accumulate", "global"))
    given = [number for number in (micro, parts, global_batch) if number is not None]
    if any(number < 1 for number in given):
        reading.add("batch sizes", IMPLIED, REFUSED, f"sizes of at least 1 are needed, and {min(given)} was given")
        return
    if not given:
        return
    other = 1
    for axis in ("tp", "pp", "cp"):
        other *= max(1, settings.get(f"{_PLAN}{axis}", 1))
    ranks = reading.world_size // other if reading.world_size else None
    degrees = settings.get(f"{_PLAN}dp_shard", -1), settings.get(f"{_PLAN}dp_replicate", 1)
    if ranks is None and min(degrees) > 0 and not (micro and parts and global_batch):
        ranks = math.prod(degrees)
        reading.add("data ranks", IMPLIED, TRANSLATED, f"{ranks}, as the degrees say")
    if ranks is None and micro and parts and global_batch:
        ranks = max(1, global_batch // (micro * parts))
        reading.add(
            "data ranks", IMPLIED, TRANSLATED, f"{ranks}, from samples a step / (samples a rank x accumulation)"
        )
    elif ranks is None:
        ranks = 1
        reading.add("data ranks", IMPLIED, DIFFERENT, "1, since the file does not say how many; --world-size N sets it")
    ranks = max(1, ranks)
    parts = parts or (max(1, global_batch // (micro * ranks)) if global_batch and micro else 1)
    micro = micro or (max(1, global_batch // (parts * ranks)) if global_batch else 1)
    global_batch = global_batch or micro * parts * ranks
    if global_batch != micro * parts * ranks:
        reading.add(
            "batch sizes",
            IMPLIED,
            REFUSED,
            f"{global_batch} samples a step are not {micro} samples a rank x {parts} micro-batches x {ranks} data ranks; "
            f"change one of them, or --world-size",
        )
        return
    settings["train.global_batch_size"], settings[f"{_PLAN}micro_batches"] = global_batch, parts
    reading.add(
        "batch sizes",
        IMPLIED,
        TRANSLATED,
        f"train.global_batch_size={global_batch}, train.plan.micro_batches={parts} ({micro} samples a rank x {parts} x {ranks} "
        f"data ranks)",
    )


def _settle_schedule(reading: Reading, source: str) -> None:
    settings = reading.settings
    shape = settings.get("schedule.shape")
    if shape is None:
        return
    rate, total = settings.get("optimizer.lr"), settings.get("schedule.total", settings.get("train.steps"))
    warmup = settings.get("schedule.warmup")
    ratio = settings.get("schedule.warmup_ratio")
    if settings.get("schedule.in_samples") and "schedule.total" in settings:
        if not isinstance(settings.get("train.global_batch_size"), int):
            reading.add("learning rate", IMPLIED, REFUSED, "samples become steps by the batch size, which is not given")
            return
        total = max(1, total // settings["train.global_batch_size"])
    steps = total if isinstance(total, int) else None
    if warmup is None and ratio:
        warmup = _ROUNDED.get(source, round)(ratio * steps) if steps else "???"
    offset, hold = settings.get("schedule.offset", 0), settings.get("schedule.hold", 0)
    if hold and (steps is None or steps <= hold):
        text = f"the last {hold} steps keep the last rate, and the run has {steps or 'no given number of'} steps: give it more"
        reading.add("learning rate", IMPLIED, REFUSED, text)
        return
    if hold and steps is not None:
        total = steps - hold
    elif settings.get("schedule.from_one") and isinstance(warmup, int) and warmup and steps is not None:
        warmup, total, offset = warmup + 1, steps + 1, 1  # step s of the warm-up has (s + 1) / (warm-up + 1)
    values = {
        "shape": shape,
        "warmup_steps": warmup or 0,
        "total_steps": "${train.steps}"
        if not isinstance(total, int) or total == settings.get("train.steps")
        else total,
        "warmup_shape": settings.get("schedule.warmup_shape", "linear"),
        "start_ratio": _as_ratio(settings, "start", rate),
        "min_ratio": _as_ratio(settings, "min", rate),
        "offset": offset,
        "decay_offset": settings.get("schedule.decay_offset", 0),
    }
    if settings.get("schedule.decay_ratio") is not None:
        values["decay_ratio"] = settings["schedule.decay_ratio"]
    if settings.get("schedule.overlap"):
        values["overlap"] = True
    settings.update({f"scheduler.{name}": value for name, value in values.items()})
    reading.add("learning rate", IMPLIED, TRANSLATED, "scheduler=" + ", ".join(f"{k}={v}" for k, v in values.items()))
    if "train.steps" not in settings and steps is not None:
        settings["train.steps"] = steps


def _as_ratio(settings: dict[str, Any], name: str, rate: float | None) -> float:
    if settings.get(f"schedule.{name}_lr") is not None and rate:
        return float(settings[f"schedule.{name}_lr"]) / rate
    return float(settings.get(f"schedule.{name}_ratio", 0.0))


def guess(values: Mapping[str, Any]) -> str | None:
    """Whose config has these keys: one of ``SOURCES``, a program that is refused by name, or None."""
    parts = {".".join(key.split(".")[:depth]) for key in values for depth in range(1, key.count(".") + 2)}
    if any(key in parts for key in _GPT_NEOX):
        return "gpt-neox"
    for program, signs in _SIGNS:
        if any(all(key in parts for key in sign.split("&")) for sign in signs.split()):
            return program
    return None


def read_config(
    source: str | None,
    config: Any,
    *,
    world_size: int | None = None,
    given: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    where: str = "the config",
) -> Ledger:
    """Reads a config of another program.

    Args:
        source: one of ``SOURCES``; None to guess.
        config: nested mappings; for Megatron also a list of words, or of pairs of a name and a value.
        world_size: for how many processes; None if that is not known.
        given: dotted keys that replace what the config says.
        without: dotted keys to leave out, with all below them.
        where: what to call the config in errors.

    Raises:
        ValueError: the source is unknown, or the config is no mapping.
    """
    if source is not None and source not in SOURCES and source not in REFUSED_PROGRAMS:
        near = difflib.get_close_matches(source, SOURCES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no source {source!r}; {hint}(the sources: {', '.join(SOURCES)})")
    if world_size is not None and (isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1):
        raise ValueError(f"world_size is {world_size!r}; it must be the number of processes, 1 or more")
    if isinstance(config, list | tuple):
        config = shell.pairs(config)
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} holds {type(config).__name__}, but a config is a mapping of keys to values")
    values = {".".join(path): value for path, value in flat(config) if path}
    values.update(given or {})
    values = {key: _followed(key, value, values) for key, value in values.items()}
    if source == "megatron":
        values = {key if " " in key else key.strip("-").replace("-", "_"): value for key, value in values.items()}
    left_out = [key for key in values if any(key == name or key.startswith(f"{name}.") for name in without)]
    missing = [name for name in without if not any(k == name or k.startswith(f"{name}.") for k in left_out)]
    if missing:
        near = difflib.get_close_matches(missing[0], values, n=1, cutoff=0.3)
        raise ValueError(f"{missing[0]!r} is to be left out, but the config has no such key; {near[:1] or ''}")
    reading = Reading({key: value for key, value in values.items() if key not in left_out}, world_size)
    for key in left_out:
        reading.add(key, values[key], "not needed", "it was left out, as asked")
    program = source or guess(reading.values)
    if program is None:
        raise ValueError(
            f"{where} is like no config that is known; name its program with --from ({', '.join(SOURCES)}), or, from "
            f"Python, by Plan.from_deepspeed and its siblings"
        )
    if program in REFUSED_PROGRAMS:
        follow({"**": refused(REFUSED_PROGRAMS[program], None, ())}, reading, program)
        for index, entry in enumerate(reading.entries):
            if entry.verdict != REFUSED and entry.key not in left_out:
                reading.entries[index] = type(entry)(entry.key, entry.value, REFUSED, REFUSED_PROGRAMS[program])
        return Ledger(program, tuple(reading.entries), {}, world_size)
    SOURCES[program](reading)
    return finish(reading, program)


def _followed(key: str, value: Any, values: Mapping[str, Any]) -> Any:
    """`value` at `key`, or what it refers to as a whole, as OmegaConf writes it.

    ``${a.b}`` is seen from the top, or from above the file, whose group is then the first name; ``${.b}`` is beside the key.
    """
    for _ in range(8):
        match = re.fullmatch(r"\$\{(\.*)([\w.]+)\}", value) if isinstance(value, str) else None
        if match is None:
            return value
        up, name = len(match[1]), match[2]
        places = [".".join([*key.split(".")[:-up], name])] if up else [name, name.partition(".")[2]]
        found = next((place for place in places if place in values), None)
        if found is None:
            return value
        key, value = found, values[found]
    return value


def read_file(
    path: Path,
    source: str | None = None,
    *,
    world_size: int | None = None,
    given: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
) -> Ledger:
    """Reads a file: JSON, YAML, TOML or Python by its suffix, anything else as a launch script of Megatron.

    Python is read and never run: a config of LiBai's, or a file of functions as torchtitan has them, of which
    ``config=NAME`` in `given` names one.

    Arguments and errors are those of :func:`read_config`. A DeepSpeed JSON, or a config that this one builds on, is
    read if it is where the file says, seen from the file's folder, a folder above it, or the working directory.
    """
    given = dict(given or {})
    text = read_utf8(path)
    python = (
        python_files.read(path, text, given)
        if path.suffix == ".py" and source in (None, "libai", "torchtitan")
        else None
    )
    if python is not None:
        return read_config(
            source or python[0], python[1], world_size=world_size, given=given, without=without, where=str(path)
        )
    config = _parsed(path, text, given)
    if source is None and path.suffix not in (".json", ".yaml", ".yml", ".toml"):
        source = next((program for program, sign in _SCRIPTS.items() if re.search(sign, text)), "megatron")
    if isinstance(config, Mapping):
        config = _with_bases(config, path)
        if "defaults" not in without:
            config = _with_defaults(config, path)
        config = _with_pointed(config, path)
        given = {
            key: value for key, value in given.items() if source != "megatron" or key in _keys(config) or "_" in key
        }
    return read_config(source, config, world_size=world_size, given=given, without=without, where=str(path))


def _keys(config: Mapping[str, Any]) -> set[str]:
    return {".".join(path) for path, _ in flat(config)}


def _parsed(path: Path, text: str, given: dict[str, Any]) -> Any:
    import yaml

    try:
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix in (".yaml", ".yml"):
            return yaml.safe_load(text) or {}
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix[1:].upper()}: {error}") from error
    variables = {key: str(given.pop(key)) for key in list(given) if re.search(rf"\b{re.escape(key)}\b", text) and
                 re.search(rf"\$\{{?{re.escape(key)}\b", text)}  # fmt: skip
    arguments = shell.arguments(text, variables, megatron.TABLE)
    options = [key for key in arguments if key in megatron.TABLE and key not in shell.LAUNCHER.split()]
    if not options and path.suffix != ".py" and not any(re.search(sign, text) for sign in _SCRIPTS.values()):
        raise ValueError(
            f"{path} has no arguments of Megatron's; give the script that has them, or set its variables, as NAME=VALUE"
        )
    if not arguments and path.suffix == ".py":
        raise ValueError(
            f"{path} is Python, which is read and not run: it is no config of LiBai's, has no function that returns one of "
            f"torchtitan's, and no arguments of a launch; give the config as YAML, if its program writes one"
        )
    return arguments


def _find_file(name: Any, beside: Path) -> Path | None:
    """The file that `name` means, seen from the config `beside`, the folders above it, or here."""
    if not isinstance(name, str) or not name:
        return None
    for folder in (beside.resolve().parent, *beside.resolve().parents[1:4], Path()):
        if (folder / name).is_file():
            return folder / name
    return None


def _with_bases(config: Mapping[str, Any], path: Path, depth: int = 0) -> dict[str, Any]:
    base = _find_file(config.get("_base_"), path)
    if base is None or depth > 8:
        return dict(config)
    below = _parsed(base, read_utf8(base), {})
    if not isinstance(below, Mapping):
        return dict(config)
    return _merged(_with_bases(below, base, depth + 1), {key: v for key, v in config.items() if key != "_base_"})


def _with_defaults(config: Mapping[str, Any], path: Path, depth: int = 0) -> dict[str, Any]:
    """`config`, laid over the files of its ``defaults:`` list, as Hydra composes them.

    Raises:
        ValueError: one of them is not there.
    """
    entries = config.get("defaults")
    if not isinstance(entries, list) or depth > 8:
        return dict(config)
    own = {key: value for key, value in config.items() if key != "defaults"}
    merged: dict[str, Any] = {}
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            merged = _merged(merged, own)
            continue
        group, name = next(iter(entry.items())) if isinstance(entry, Mapping) and entry else (None, entry)
        words = str(group or "").split()
        group, _, package = (words[-1] if words else "").lstrip("/").partition("@")
        if not isinstance(name, str) or group.startswith("hydra"):
            continue  # none of the group, several of it, or Hydra's own
        group, _, name = f"{group}/{name}".strip("/").removesuffix(".yaml").rpartition("/")
        file = _find_file(f"{group}/{name}.yaml".lstrip("/"), path)
        if file is None and "optional" in words:
            continue
        if file is None:
            raise ValueError(
                f"{path} builds on {f'{group}/{name}'.lstrip('/')!r} (defaults:), and there is no such file beside it: "
                f"put it there, or leave all of them out with --without defaults"
            )
        text = read_utf8(file)
        below = _parsed(file, text, {})
        said = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
        package = package or (said[1] if said else group.replace("/", "."))
        nested = _with_defaults(below, file, depth + 1) if isinstance(below, Mapping) else {}
        for part in reversed([] if package in ("_global_", "") else package.removeprefix("_global_.").split(".")):
            nested = {part: nested}
        merged = _merged(merged, nested)
    return merged


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _with_pointed(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """`config` with the DeepSpeed file that it names in its place."""
    for names in (("deepspeed",), ("deepspeed_config", "deepspeed_config_file"), ("dist_config", "config_file")):
        group: Any = config
        for name in names[:-1]:
            group = group.get(name) if isinstance(group, Mapping) else None
        pointed = _find_file(group.get(names[-1]), path) if isinstance(group, Mapping) else None
        if pointed is not None and isinstance(inner := _parsed(pointed, read_utf8(pointed), {}), Mapping):
            if len(names) == 2 and names[0] != "deepspeed_config":
                config = {**config, "deepspeed": inner, names[0]: {**group, names[-1]: None}}
            elif len(names) == 2:
                config = {**config, names[0]: {**group, names[-1]: inner}}
            else:
                config = {**config, names[0]: inner}
    return config
