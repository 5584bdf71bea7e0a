"""Checks of single fields of a Plan and of its parts. Each raises with a sentence that names the field."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError, fields
from functools import wraps
from typing import Any, TypeVar

from tensorshard.common.words import with_article

_Class = TypeVar("_Class")

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS.update({"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40})


def _nearest(value: Any, known: Sequence[str], cutoff: float) -> list[str]:
    """The one of `known` that is most like `value`, in a list that is empty where none is like it."""
    import difflib  # imported when used: `import tensorshard` stays quick

    return difflib.get_close_matches(str(value), known, n=1, cutoff=cutoff)


def unknown_field(cls: type, values: Iterable[Any]) -> str | None:
    """A message about the first of `values` that is no field of the dataclass `cls`; None if all are."""
    known = [f.name for f in fields(cls)]
    for key in values:
        if key not in known:
            near = _nearest(key, known, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(known)}"
            return f"{cls.__name__} has no field {key!r}; {hint}"
    return None


def data_with_known_fields(cls: type[_Class]) -> type[_Class]:
    """Makes the frozen dataclass `cls` raise with advice when it is given an unknown field, or is changed."""
    initialize = cls.__init__

    @wraps(initialize)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        unknown = unknown_field(cls, values)
        if unknown is not None:
            raise TypeError(unknown)
        initialize(self, *args, **values)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        raise FrozenInstanceError(
            f"{name} of {with_article(cls.__name__)} cannot be changed; make a new one: "
            f"dataclasses.replace({cls.__name__.lower()}, {name}={value!r})"
        )

    cls.__init__ = __init__  # type: ignore[assignment]
    cls.__setattr__ = __setattr__  # type: ignore[assignment,method-assign]
    return cls


def as_given(name: str, value: Any) -> str:
    """How an error begins: the name and the value, and that it is a string if it is a number in quotes."""
    is_quoted = isinstance(value, str) and re.fullmatch(r"\s*-?[\d.]+\s*", value)
    return f"{name} is {value!r}" + ", a string" * bool(is_quoted)


def check_int(name: str, value: Any, least: int) -> None:
    """Raises unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{as_given(name, value)}; it must be an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_positive(name: str, value: Any) -> None:
    """Raises unless `value` is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{as_given(name, value)}; it must be a positive number or None")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; it must be a positive, finite number, or None to turn it off")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises unless `value` is one of `choices`; the message names the nearest."""
    if value not in choices:
        near = _nearest(value, choices, cutoff=0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}{hint}")


def size_in_bytes(name: str, value: Any) -> int:
    """Bytes of a number, or of text such as "6GiB" or "500 MB".

    Raises:
        ValueError, TypeError: `value` is no size, or less than a byte.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name}={value!r} was given; it must be a number of bytes, or text such as '5GB' or '6GiB'")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(
                f"{name}={value!r} was given; it must be a number of bytes, or text such as '5GB' or '6GiB'"
            )
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    if value < 1:
        raise ValueError(f"{name}={value} was given; it must be at least one byte")
    return value


def size_in_seconds(name: str, value: Any) -> float:
    """Seconds of a number, or of text such as "90s", "2m" or "1h".

    Raises:
        ValueError, TypeError: `value` is no duration, or not above zero.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{name}={value!r} was given; it must be seconds, or text such as '90s' or '2m'")
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([smh]?)\s*", str(value))
    seconds = 0.0 if match is None else float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    if seconds <= 0:
        raise ValueError(f"{name}={value!r} was given; it must be seconds above 0, or text such as '90s' or '2m'")
    return seconds


def check_experts(plan: Mapping[str, Any], axes: str) -> None:
    """Checks ``ep`` against the other fields of a resolved plan.

    Args:
        axes: along which experts are split, for people.

    Raises:
        ValueError: they do not go together.
    """
    ep, ranks = plan["ep"], plan["dp_shard"] * plan["cp"]
    if ranks % ep:
        divisors = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise ValueError(
            f"ep={ep} was given, and experts are split over the ranks of {axes}, of which there are {ranks}; ep can be "
            f"{', '.join(divisors)}"
        )
