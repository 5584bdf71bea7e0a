"""Overrides ``a.b=c``: the dotted key is looked up, the value is read as YAML and checked against the present one."""

import copy
import inspect
import os
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError
from yaml import YAMLError

from tensorshard.config.lazy import (
    CALL_KEYS,
    WEIGHTS_KEY,
    ConfigError,
    check_calls,
    find_target,
    parameters,
    suggest,
    target_name,
)

_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}


@dataclass(frozen=True)
class Kinds:
    """The accepted types, of those that YAML knows. An empty set accepts anything."""

    types: frozenset[type] = frozenset()

    @property
    def anything(self) -> bool:
        """Whether any value is accepted."""
        return not self.types

    def __or__(self, other: "Kinds") -> "Kinds":
        return Kinds(self.types | other.types)

    @classmethod
    def of_value(cls, value: Any) -> "Kinds":
        """The kind of `value`. For None, and for a value that is not plain data, anything is accepted."""
        if isinstance(value, ListConfig | list | tuple):
            return cls(frozenset({list}))
        if isinstance(value, DictConfig | dict):
            return cls(frozenset({dict}))
        return cls(frozenset({type(value)} & _WORDS.keys()))

    @classmethod
    def of_annotation(cls, annotation: Any) -> "Kinds":
        """The kinds that satisfy a parameter's `annotation`; anything if it does not say.

        In a union, classes that YAML cannot spell are ignored: ``float | Tensor`` is a number.
        """
        if annotation in _WORDS:
            return cls(frozenset({annotation}))
        origin = get_origin(annotation)
        if origin in (Union, types.UnionType):
            members = [member for member in get_args(annotation) if member is not type(None)]
            if any(member in (Any, object) for member in members):
                return cls()
            return cls(frozenset().union(*(cls.of_annotation(member).types for member in members)))
        if origin is Literal:
            return cls(frozenset(type(value) for value in get_args(annotation)) & _WORDS.keys())
        outer = origin or annotation
        if not inspect.isclass(outer) or outer is object:
            return cls()
        if issubclass(outer, Mapping):
            return cls(frozenset({dict}))
        if issubclass(outer, os.PathLike):
            return cls(frozenset({str}))
        if outer in (list, tuple, Sequence, Iterable):
            return cls(frozenset({list}))
        return cls()

    def convert(self, value: Any, raw: str, key: str, now: Any) -> Any:
        """`value` as one of these kinds; whole numbers pass between int and float, text stays as typed.

        Args:
            value: the value that YAML read. raw: the text that was typed. key: the key that is set. now: its present
                value.

        Raises:
            ConfigError: the value is of another kind.
        """
        if value is None or self.anything or type(value) in self.types or _refers(value):
            return value
        if type(value) is int and float in self.types:
            return float(value)
        if type(value) is float and int in self.types and value.is_integer():
            return int(value)
        if str in self.types and not isinstance(value, list | dict):
            return raw
        expected = " or ".join(sorted(_WORDS[kind] for kind in self.types))
        raise ConfigError(f"{key}={raw}: {key} takes {expected} (it is {now!r} now), and {raw!r} is not one")


def _refers(value: Any) -> bool:
    """Whether `value` refers to another key, ``${a.b}``, whose kind is not known here."""
    return isinstance(value, str) and "${" in value


@dataclass(frozen=True)
class Override:
    """One ``key=value`` of a command line.

    Attributes:
        key: the dotted key, list positions included: ``train.hooks.0.every``.
        raw: the value as it was typed.
        value: the same, read as YAML.
    """

    key: str
    raw: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> "Override":
        """Reads ``a.b=c``; list positions may be written ``a[0]`` or ``a.0``, and null also ``None``.

        Raises:
            ConfigError: there is no ``=``, the key is empty, or the value is not YAML.
        """
        key, equals, raw = text.partition("=")
        key = re.sub(r"\[(\d+)\]", r".\1", key.strip())
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{text!r} is not an override; one is written key=value, for instance train.steps=100")
        if raw == "None":
            return cls(key, raw, None)
        try:
            # OmegaConf reads YAML safely, and takes 3e-4 for a number.
            value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]))["value"]  # type: ignore[index,call-overload]
        except YAMLError as error:
            raise ConfigError(
                f"the value in {text!r} is not YAML; quotes make it a string: {key}='\"{raw}\"'"
            ) from error
        return cls(key, raw, value)


def apply_overrides(config: DictConfig, overrides: Iterable[str]) -> DictConfig:
    """A copy of `config` with each ``key=value`` of `overrides` applied in turn.

    Known keys are those that the config has and, under a recorded call, all parameters of its target. A mapping for a
    group of keys changes only the keys that it names.

    Raises:
        ConfigError: a key is unknown (the error names the nearest known one), a value has another type than the key's,
            or a recorded call does not take an argument.
    """
    config = copy.deepcopy(config)
    with open_dict(config):
        for text in overrides:
            _apply(config, Override.parse(text))
    check_calls(config)
    return config


@dataclass(frozen=True)
class _Slot:
    """A place in a config that may be set.

    Attributes:
        key: its key or index in its group.
        current: the value that the config has there; None if it has none.
        now: the value that holds now: `current`, or else the default of the argument.
        kinds: the kinds of values that it takes.
        whole: whether a mapping here is one value, which is replaced as a whole, and not a group of keys.
        made_of: the dataclass whose fields are the keys here, if an argument takes one and the config has none.
    """

    key: str | int
    current: Any
    now: Any
    kinds: Kinds
    whole: bool = False
    made_of: type | None = None


def _apply(config: DictConfig, override: Override) -> None:
    *path, last = override.key.split(".")
    group: Any = config
    for depth, part in enumerate(path, start=1):
        slot = _slot(group, part, override.key)
        if slot.current is None and slot.made_of is not None:
            group[slot.key] = {"_target_": target_name(slot.made_of)}
            slot = _slot(group, part, override.key)
        group = slot.current
        if not isinstance(group, DictConfig | ListConfig):
            at = ".".join(path[:depth])
            raise ConfigError(f"{override.key}={override.raw}: {at} is {group!r} and has no keys of its own")
    _assign(group, last, override)


def _assign(group: Any, part: str, override: Override) -> None:
    slot = _slot(group, part, override.key)
    current, value = slot.current, override.value
    if not isinstance(current, DictConfig) or slot.whole or value is None:
        group[slot.key] = slot.kinds.convert(value, override.raw, override.key, slot.now)
    elif isinstance(value, dict):
        for key, item in value.items():
            _assign(current, str(key), Override(f"{override.key}.{key}", str(item), item))
    else:
        keys = [str(key) for key in current if key not in CALL_KEYS]
        first = keys[0] if keys else "KEY"
        raise ConfigError(
            f"{override.key}={override.raw}: {override.key} is a group of keys "
            f"({', '.join(keys) or 'none set'}); set one of them: {override.key}.{first}=..."
        )


def _slot(group: DictConfig | ListConfig, part: str, where: str) -> _Slot:
    """The place `part` in `group`, for the override of key `where`.

    Raises:
        ConfigError: there is no such place.
    """
    if isinstance(group, ListConfig):
        if not part.isdecimal() or int(part) >= len(group):
            raise ConfigError(
                f"{where}: the list has {len(group)} items, at 0 to {len(group) - 1}, and none at {part!r}"
            )
        current = group[int(part)]
        return _Slot(int(part), current, current, Kinds.of_value(current))
    current = _current(group, part)
    if "_target_" not in group:
        known = [str(key) for key in group]
        if known and part not in known:
            raise ConfigError(f"{where}: there is no key {part!r} here; {suggest(part, known, 'the keys here')}")
        return _Slot(part, current, current, Kinds.of_value(current))
    name = group["_target_"]
    known_parameters = parameters(find_target(name, where))
    if part not in (known_parameters or ()) and where == WEIGHTS_KEY:
        return _Slot(part, current, current, Kinds.of_annotation(str))
    if known_parameters is None or part in CALL_KEYS:
        return _Slot(part, current, current, Kinds.of_value(current))
    if part not in known_parameters:
        raise ConfigError(
            f"{where}: {name} has no argument {part!r}; {suggest(part, known_parameters, 'its arguments')}"
        )
    parameter = known_parameters[part]
    kinds = Kinds.of_annotation(parameter.annotation)
    whole = dict in kinds.types and not (isinstance(current, DictConfig) and "_target_" in current)
    if kinds.anything:
        kinds = Kinds.of_value(current) | Kinds.of_value(parameter.default)
    now = None if parameter.default is parameter.empty else parameter.default
    return _Slot(part, current, current if part in group else now, kinds, whole, _dataclass(parameter.annotation))


def _dataclass(annotation: Any) -> type | None:
    """The dataclass in a parameter's `annotation`, which may be a union with other types; None if there is none."""
    members = [annotation, *get_args(annotation)]
    return next((member for member in members if isinstance(member, type) and is_dataclass(member)), None)


def _current(group: DictConfig, key: str) -> Any:
    """The value at `key`; None if there is none, or if it is not known yet."""
    if key not in group or OmegaConf.is_missing(group, key):
        return None
    try:
        return group[key]
    except InterpolationResolutionError:
        return None
