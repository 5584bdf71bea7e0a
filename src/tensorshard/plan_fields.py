"""Checks of a plan's fields, each by itself; what makes no sense on any hardware is refused."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import FrozenInstanceError, fields
from functools import wraps
from typing import Any, TypeVar

_Class = TypeVar("_Class")

ZERO_NAMES = {"os": 1, "os_g": 2, "p_g_os": 3}
"""Paddle's names of the ZeRO levels: optimizer states, + gradients, + parameters."""


def unknown_field(cls: type, values: Iterable[Any]) -> str | None:
    """What is wrong with the first of `values` that is no field of the dataclass `cls`."""
    known = [f.name for f in fields(cls)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(known)}"
            return f"Plan has no field {key!r}; {hint}"
    return None


def data_with_known_fields(cls: type[_Class]) -> type[_Class]:
    """Has the frozen dataclass `cls` say what to do where it is given a field that does not exist, or is changed."""
    initialize = cls.__init__

    @wraps(initialize)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        unknown = unknown_field(cls, values)
        if unknown is not None:
            raise TypeError(unknown)
        initialize(self, *args, **values)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        raise FrozenInstanceError(
            f"{name} of a Plan cannot be changed, as a run may stand on it; make another one: "
            f"dataclasses.replace(plan, {name}={value!r})"
        )

    cls.__init__ = __init__  # type: ignore[assignment]
    cls.__setattr__ = __setattr__  # type: ignore[assignment,method-assign]
    return cls


def check_int(name: str, value: Any, least: int) -> None:
    """Whether `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_degree(axis: str, value: Any) -> None:
    """Whether `value` may be the degree of an axis."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{axis} is {value!r}; it must be a positive integer, or -1 to be inferred")
    if value < 1 and value != -1:
        raise ValueError(f"{axis} is {value}; it must be a positive integer, or -1 to be inferred")


def check_positive(name: str, value: Any) -> None:
    """Whether `value` is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be a positive number or None")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; it must be a positive, finite number, or None to turn it off")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Whether `value` is one of `choices`; names the nearest."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}{hint}")


def as_zero_level(value: Any) -> int:
    """The ZeRO level that `value` is, or is Paddle's name of."""
    if isinstance(value, str) and value in ZERO_NAMES:
        return ZERO_NAMES[value]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 3:
        names = ", ".join(f"{name!r} ({level})" for name, level in ZERO_NAMES.items())
        raise ValueError(f"zero is {value!r}; the levels are 0, 1, 2 and 3, also by the names {names}")
    return value


def as_module_names(name: str, value: Any) -> list[str] | None:
    """`value` as a list of names of modules, or None."""
    if value is None:
        return None
    if isinstance(value, list | tuple) and value and all(isinstance(member, str) for member in value):
        return list(value)
    raise TypeError(f"{name} is {value!r}; it must be None or a non-empty list of module names")


def as_shard_units(value: Any) -> int | list[str] | None:
    """`value` as bytes, as a list of names of modules, or None."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        check_int("shard_units", value, least=1)
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return list(value)
    raise TypeError(
        f"shard_units is {value!r}; it must be None, a number of bytes, or a non-empty list of module names"
    )


def check_table(value: Any) -> None:
    """Whether `value` may be a ``tp_plan``; whether its styles exist is found out where they are used."""
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(part, str) for entry in value.items() for part in entry):
        raise TypeError(
            f"tp_plan is {value!r}; it must be None or a dict of module names to styles, such as "
            f"{{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}}"
        )
