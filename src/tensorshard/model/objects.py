"""What Python objects hold: which lead to no others, the variables of closures, and slots."""

import weakref
from collections.abc import Iterator
from enum import Enum
from logging import Logger
from types import CellType, CodeType, MemberDescriptorType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

ATOMIC: tuple[type, ...] = (
    type(None), type(Ellipsis), type(NotImplemented), bool, int, float, complex, str, bytes, type, range, slice,
    property, CodeType, ModuleType, Enum, Logger, dist.ProcessGroup,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
"""Classes of objects that lead to none that code may change; copies share them."""

ATOMIC_TYPES = frozenset(ATOMIC)
"""The same, for a quick look at the class alone."""

WEAK_REFERENCES = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
WEAK_CONTAINERS = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)


def contents_of(cell: CellType) -> tuple[Any, ...]:
    """What a variable of a closure holds; nothing if it was not given a value yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def slots_of(value: Any) -> Iterator[tuple[type, str]]:
    """The slots of an object: for each, the class that declares it, and the name of its descriptor there."""
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            for name, descriptor in vars(kind).items():
                if isinstance(descriptor, MemberDescriptorType):
                    yield kind, name
