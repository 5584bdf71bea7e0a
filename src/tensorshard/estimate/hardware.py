"""Devices by name: how much memory they have, and what of it is taken before any tensor is."""

import difflib
import re
from dataclasses import dataclass
from typing import Any

_GIB = 1 << 30
_UNITS = {"": 1, "B": 1, **{f"{k}iB": 1 << 10 * i for i, k in enumerate("KMGT", 1)}}
_UNITS |= {f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Hardware:
    """A device.

    Args:
        name: of it.
        memory: bytes that it has, as its driver says.
        context: bytes that a process takes before its first tensor: the context, libraries and communicators. Assumed,
            not measured.
    """

    name: str
    memory: int
    context: int = _GIB * 3 // 4


_DEVICES = {
    "h200": 141, "h100": 80, "a100-80": 80, "a100-40": 40, "v100-32": 32, "v100-16": 16, "rtx-4090": 24,
    "rtx-3090": 24, "titan-xp": 12,
}  # fmt: skip


def find_hardware(hardware: str | Hardware | None) -> Hardware | None:
    """The device of a name.

    Raises:
        ValueError: unknown; says which names are known.
    """
    if hardware is None or isinstance(hardware, Hardware):
        return hardware
    name = str(hardware).lower().replace("_", "-").replace(" ", "-")
    if name not in _DEVICES:
        near = difflib.get_close_matches(name, _DEVICES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"hardware={hardware!r} is not known; {hint}known are {', '.join(_DEVICES)}")
    return Hardware(name, _DEVICES[name] * _GIB)


def size_in_bytes(name: str, value: Any) -> int:
    """Bytes of a number, or of text such as "24GiB".

    Raises:
        ValueError, TypeError: it is no such thing, or less than a byte.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} is {value!r}; it must be a number of bytes, or text such as '24GiB'")
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if found is None or found[2].lower() not in units:
            raise ValueError(f"{name} is {value!r}; it must be a number of bytes, or text such as '24GiB'")
        value = int(float(found[1]) * units[found[2].lower()])
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least one byte")
    return int(value)
