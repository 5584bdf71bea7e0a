"""The kinds of rules that tables are made of, and what several programs' tables say alike."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from tensorshard.foreign_configs.ledger import (
    DIFFERENT,
    IMPLIED,
    NOT_NEEDED,
    REFUSED,
    TRANSLATED,
    Outcome,
    Reading,
    Rule,
    fits,
    in_our_words,
    real_keys,
    shown,
)

MODEL = "the model is yours: train MODEL.py's, or model.pretrained=DIR; this key says how theirs is built"
DATA = "the data is yours: data.train, or text.files for the shipped dataset"
LOGS = "metrics go to metrics.jsonl; train.loggers names tensorboard, wandb or mlflow"
SAVES = "train.output_dir, train.save_every, train.keep_checkpoints and --resume say what is kept and read"
START = "the start says it: 'tensorshard train' or torchrun, with --nproc, --nnodes and --rdzv-endpoint"
STAGES = "stages are balanced by cost; train.plan.pp_split sets the cuts"
OFFLOADED = {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"}


def to(target: str, kind: Any, convert: Callable[[Any], Any] = lambda value: value, auto: Any = None) -> Rule:
    """A key that sets `target` of ours, to ``convert(value)``."""

    def act(reading: Reading, value: Any) -> Outcome:
        reading.settings[target] = convert(value)
        return TRANSLATED, f"{in_our_words(target)}={reading.settings[target]}"

    return Rule(kind, act, auto, target)


def unneeded(text: str, kind: Any = None) -> Rule:
    """A key that has no work to do here."""
    return Rule(kind, lambda reading, value: (NOT_NEEDED, text), auto=text, heeds=False)


def different(text: str, kind: Any = None) -> Rule:
    """A key whose matter works in another way here."""
    return Rule(kind, lambda reading, value: (DIFFERENT, text), auto=text, heeds=False)


_OFF: tuple[Any, ...] = (False, 0, "", "no", "none", "None", [], {}, "disabled", "off")


def refused(text: str, kind: Any = None, unless: tuple[Any, ...] = _OFF) -> Rule:
    """A key that cannot be honoured, unless its value turns it off."""

    def act(reading: Reading, value: Any) -> Outcome:
        if any(type(value) is type(off) and value == off for off in unless):
            return NOT_NEEDED, f"it is {shown(value)}, which asks for nothing"
        return REFUSED, text

    return Rule(kind, act)


def only_if(flag: str, rule: Rule, off: str) -> Rule:
    """`rule` where the file's `flag` is on; else the key does nothing, as `off` says."""

    def act(reading: Reading, value: Any) -> Outcome:
        return rule.act(reading, value) if reading.get(flag) else (NOT_NEEDED, off)

    return Rule(rule.kind, act, off)


def each(names: str, rule: Rule, prefix: str = "") -> dict[str, Rule]:
    """`rule` for each of the `names`, which blanks separate."""
    return {prefix + name: rule for name in names.split()}


def listed(program: str, patterns: str, rule: Rule) -> dict[str, Rule]:
    """`rule` for each of the program's keys in keys.json that fits one of the `patterns`, which blanks separate."""
    return {key: rule for key in sorted(real_keys(program)[1]) if any(fits(one, key) for one in patterns.split())}


def degree(axis: str) -> Rule:
    """The number of ranks along an axis of the Plan."""
    return to(f"train.plan.{axis}", int)


def switch(target: str, value: Any) -> Rule:
    """A switch that sets `target` to `value` where it is on, and leaves it alone where it is off."""
    return Rule(bool, lambda r, on: to(target, None).act(r, value) if on else (NOT_NEEDED, "it is off"))


RECOMPUTE = to("train.plan.recompute", ("full", "selective"))
RECOMPUTE_ALL = to("train.plan.recompute", bool, lambda on: "full" if on else "none")
OFFLOAD_ALL = to("train.plan.offload", bool, lambda on: dict(OFFLOADED) if on else None)
RESHARD = to("train.plan.zero", bool, lambda on: 3 if on else 2)
CLIP = to("train.plan.clip_grad_norm", float, lambda value: value or None)


def betas(index: int, other: float = 0.999) -> Rule:
    """One of the two decay rates of Adam's means; the second is `other` where the file does not have it."""

    def act(reading: Reading, value: float) -> Outcome:
        both = list(reading.settings.get("optimizer.betas", (0.9, other)))
        both[index] = value
        reading.settings["optimizer.betas"] = both
        return TRANSLATED, f"optimizer.betas[{index}]={value}"

    return Rule(float, act)


def optimizer(names: Mapping[str, str]) -> Rule:
    """A name of an optimizer, or of its class: `names` are theirs in lower case, and those of torch.optim."""

    def act(reading: Reading, value: str) -> Outcome:
        name = names.get(value.rpartition(".")[2].lower())
        if name is None:
            return REFUSED, f"{value} is not known here; use AdamW, or a class of your own in a Python config"
        reading.settings["optimizer._target_"] = f"torch.optim.{name}"
        return TRANSLATED, f"optimizer is torch.optim.{name}"

    return Rule(str, act)


def schedule(names: Mapping[str, str]) -> Rule:
    """A name of a schedule: `names` are theirs, and our shapes."""

    def act(reading: Reading, value: str) -> Outcome:
        if value not in names:
            return REFUSED, f"{value} is not there; use {', '.join(names)}, or a schedule in a Python config"
        return to("schedule.shape", None).act(reading, names[value])

    return Rule(str, act)


def ranks(reading: Reading, each_node: str, nodes: str) -> None:
    """Takes the number of processes from the file: those of a node, by the number of nodes, where both are numbers."""
    given = [str(reading.values.get(key, default)) for key, default in ((each_node, 0), (nodes, 1))]
    found = [re.match(r"[1-9]\d*(?=\s|$)", number) for number in given]
    if reading.world_size is None and all(found):
        reading.world_size = math.prod(int(match[0]) for match in found if match)


def imply_little(reading: Reading) -> None:
    """Writes out the defaults of a program that splits, clips and schedules nothing by itself."""
    settings = reading.settings
    reading.imply("precision", "train.plan.precision", "fp32")
    reading.imply("zero or sharding", "train.plan.zero", 0, "whole replicas are their default")
    reading.imply("clipping", "train.plan.clip_grad_norm", None, "none is their default")
    reading.imply("schedule", "schedule.shape", "constant", "no schedule is their default")
    if "optimizer.lr" in settings:
        reading.imply("optimizer", "optimizer._target_", "torch.optim.AdamW")
    settings.setdefault("train.steps", "???")


def say_what_decays(reading: Reading, program: str) -> None:
    """Says that biases and norms are decayed here, and not by `program`."""
    text = f"{program} decays matrices alone; here all, unless the config's optimizer has groups"
    reading.add("weight_decay of biases and norms", IMPLIED, DIFFERENT, text)
