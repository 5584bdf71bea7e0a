"""Checks of a Plan's own fields, each by itself. They refuse values that make no sense on any hardware."""

from typing import Any

from tensorshard.plan.field_checks import check_int

ZERO_NAMES = {"os": 1, "os_g": 2, "p_g_os": 3}
"""Paddle's names of the ZeRO levels: optimizer states, + gradients, + parameters."""


def check_degree(axis: str, value: Any) -> None:
    """Raises unless `value` may be the degree of an axis."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{axis} is {value!r}; it must be a positive integer, or -1 to be inferred")
    if value < 1 and value != -1:
        raise ValueError(f"{axis} is {value}; it must be a positive integer, or -1 to be inferred")


def as_zero_level(value: Any) -> int:
    """The ZeRO level for `value`, a number or one of Paddle's names."""
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
    """Raises unless `value` may be a ``tp_plan``. Its styles are checked where they are used."""
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(part, str) for entry in value.items() for part in entry):
        raise TypeError(
            f"tp_plan is {value!r}; it must be None or a dict of module names to styles, such as "
            f"{{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}}"
        )
