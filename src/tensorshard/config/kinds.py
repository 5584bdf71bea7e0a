"""The kinds of values that a key of a config takes, from an annotation or from its present value."""

import inspect
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import DictConfig, ListConfig

from tensorshard.config.config_error import ConfigError

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
