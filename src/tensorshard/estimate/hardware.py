"""Devices by name: how much memory they have, and what of it is taken before any tensor is."""

import difflib
from dataclasses import dataclass

_GIB = 1 << 30


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
        near = [known for known in _DEVICES if known.startswith(name)] or difflib.get_close_matches(name, _DEVICES, n=1)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"hardware={hardware!r} is not known; {hint}known are {', '.join(_DEVICES)}")
    return Hardware(name, _DEVICES[name] * _GIB)
