"""Low-rank adapters of other programs' configs, which ``tensorshard.models.with_lora`` makes here."""

from collections.abc import Callable, Mapping
from typing import Any

from tensorshard.foreign_configs.ledger import (
    IMPLIED,
    NOT_NEEDED,
    REFUSED,
    TRANSLATED,
    Outcome,
    Reading,
    Rule,
)
from tensorshard.foreign_configs.rules import (
    refused,
    to,
)

_MAKES = "tensorshard.models.with_lora"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
QUANTIZED = "the base would have weights of 4 or 8 bits, which a config cannot load: load it in 16 bits, or see docs/adapters.md"


def begin(reading: Reading) -> Outcome:
    """Has the model made with adapters."""
    reading.settings["model._target_"] = _MAKES
    return TRANSLATED, f"model._target_={_MAKES}: the weights of model.pretrained are frozen"


def layers(value: Any) -> Any:
    """Names of layers as peft takes them, from a list, a text with commas, or "all"."""
    if value in ("all", ["all"], "all-linear"):
        return "all-linear"
    return value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]


def pattern(value: Any) -> Any:
    """As :func:`layers`, of a program that takes a text for a regular expression, as peft does."""
    return layers(value) if isinstance(value, list) else value


def numbers(
    wanted: Callable[[Reading], bool],
    names: Mapping[str, str],
    prefix: str = "",
    layers: Callable[[Any], Any] = layers,
) -> dict[str, Rule]:
    """Rules for keys that say how adapters are made; `names` are theirs, and ours below ``model.``.

    Args:
        wanted: whether the config asks for adapters.
        names: without `prefix`.
        layers: makes names of layers of a value.
    """

    def rule(ours: str, kind: Any, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
        act = to(f"model.{ours}", None, convert).act
        return Rule(kind, lambda r, v: act(r, v) if wanted(r) else (NOT_NEEDED, "there are no adapters"))

    kinds = {"r": int, "lora_alpha": int, "lora_dropout": float, "use_dora": bool, "use_rslora": bool}
    return {
        prefix + theirs: rule(ours, kinds.get(ours), *([] if ours in kinds else [layers]))
        for theirs, ours in names.items()
    }


def others(wanted: Callable[[Reading], bool], text: str = "such adapters are not there; see docs/adapters.md") -> Rule:
    """A key of adapters that cannot be honoured."""
    rule = refused(text)
    return Rule(None, lambda r, v: rule.act(r, v) if wanted(r) else (NOT_NEEDED, "there are no adapters"))


def imply(reading: Reading, **defaults: Any) -> None:
    """Writes the program's defaults out, and what the base is held in, if there are adapters."""
    if reading.settings.get("model._target_") == _MAKES:
        for name, value in defaults.items():
            reading.imply(name, f"model.{name}", value)
        if "model.target_modules" not in reading.settings:
            reading.add(
                "target_modules", IMPLIED, REFUSED, "the file does not say which layers get adapters; name them"
            )
        reading.imply("dtype", "model.dtype", _DTYPES[reading.settings["train.plan.precision"]], "as it computes")
