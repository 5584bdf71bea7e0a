"""Finds blocks that are alike: two blocks that do the same have equal descriptions."""

import enum
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.fsdp import FSDP_STATE
from tensorshard.torch_private.modules import TABLES, own_buffers, own_parameters

SIMPLE = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size)
_PACKAGE = __name__.partition(".")[0]
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_SMALL = 1 << 12  # the most elements of a tensor whose values are compared

Read = tuple[str, str]
"""The name of a module within its block, and of one of its attributes."""


def describe_structure(block: nn.Module, kept: list[Any], apart_from: object = None) -> Hashable:
    """What `block` is made of: equal for two blocks that compute alike, apart from their plain attributes.

    The block's modules are described by their place, parameters and buffers by their shapes, functions by their code
    and what they refer to. Any other object equals only itself. Attributes that are numbers or text are left out: most
    do not matter, such as the number of a layer, and :func:`noted_reads` tells which of them do.

    Args:
        kept: a list that gets the objects which are compared by their identity. They must stay alive, or another object
            could get the same identity.
        apart_from: an object that forwards refer to, and that is not compared.
    """
    return _Describer(block, kept, apart_from).describe()


@contextmanager
def noted_reads(block: nn.Module) -> Iterator[set[Read]]:
    """Inside, notes which plain attributes of the block's modules are read."""
    names = {id(module): name for name, module in block.named_modules()}
    reads: set[Read] = set()
    changed: list[tuple[type, Any]] = []

    def watch(cls: type) -> None:
        original: Any = cls.__getattribute__

        def read(self: Any, name: str) -> Any:
            value = original(self, name)
            if isinstance(value, SIMPLE) and id(self) in names and name in object.__getattribute__(self, "__dict__"):
                reads.add((names[id(self)], name))
            return value

        changed.append((cls, vars(cls).get("__getattribute__")))
        cls.__getattribute__ = read  # type: ignore[method-assign,assignment]

    try:
        # A class that derives from a watched class is watched already.
        for cls in sorted({type(module) for module in block.modules()}, key=lambda cls: len(cls.__mro__)):
            if not any(cls is not other and issubclass(cls, other) for other, _ in changed):
                watch(cls)
        yield reads
    finally:
        for cls, before in reversed(changed):
            if before is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = before  # type: ignore[method-assign]


def values_of(block: nn.Module, reads: Iterable[Read]) -> dict[Read, Any]:
    """The present values of the attributes that were read."""
    return {(path, name): vars(block.get_submodule(path)).get(name) for path, name in reads}


class _Describer:
    def __init__(self, block: nn.Module, kept: list[Any], apart_from: object) -> None:
        self._block = block
        self._apart_from = apart_from
        self._kept = kept
        self._modules = {id(module): name for name, module in block.named_modules()}
        self._tensors: dict[int, int] = {}  # parameters and buffers, which may be tied
        self._seen: dict[int, tuple[int, Any]] = {}  # objects that were described, each with its number

    def describe(self) -> Hashable:
        return tuple(self._module(name, module) for name, module in self._block.named_modules())

    def _module(self, name: str, module: nn.Module) -> Hashable:
        attributes: list[Hashable] = []
        for key, value in sorted(vars(module).items()):
            if key in TABLES or isinstance(value, SIMPLE) or "state_dict" in key:
                continue
            if module is self._block and key.startswith(FSDP_STATE):
                continue  # FSDP's state, which the block's hooks use to gather and reduce
            if key.endswith(_HOOKS):
                if module is not self._block:  # the block's own hooks run around the call, and are not compared
                    attributes.append((key, tuple(self._value(hook) for hook in value.values())))
                continue
            attributes.append((key, self._value(value)))
        return (
            name,
            self._value(type(module)),
            tuple((key, self._tensor(value)) for key, value in own_parameters(module).items()),
            tuple((key, self._tensor(value)) for key, value in own_buffers(module).items()),
            tuple(attributes),
        )

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if id(tensor) in self._tensors:
            return ("again", self._tensors[id(tensor)])
        self._tensors[id(tensor)] = len(self._tensors)
        shape = (type(tensor).__name__, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad)
        if isinstance(tensor, FakeTensor) or tensor.is_meta or isinstance(tensor, nn.Parameter):
            return shape
        if type(tensor) is torch.Tensor and tensor.numel() <= _SMALL:
            return (*shape, str(tensor.tolist()))
        return (*shape, self._identity(tensor))

    def _identity(self, value: Any) -> Hashable:
        self._kept.append(value)
        return ("object", id(value))

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, SIMPLE):
            return (type(value).__name__, value)
        if value is self._apart_from:
            return ("apart",)
        if id(value) in self._modules:
            return ("module", self._modules[id(value)])
        if id(value) in self._seen:
            return ("again", self._seen[id(value)][0])
        self._seen[id(value)] = (len(self._seen), value)
        return self._compound(value)

    def _compound(self, value: Any) -> Hashable:
        if isinstance(value, dist.ProcessGroup | type | nn.Module | BuiltinFunctionType):
            return self._identity(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return (type(value).__name__, tuple(self._value(item) for item in value))
        if isinstance(value, set | frozenset):
            return ("set", frozenset(self._value(item) for item in value))
        if isinstance(value, dict):
            return ("dict", tuple((self._value(key), self._value(item)) for key, item in value.items()))
        if isinstance(value, partial):
            return ("partial", self._value(value.func), self._value(value.args), self._value(value.keywords))
        if isinstance(value, MethodType):
            return ("method", self._value(value.__func__), self._value(value.__self__))
        if isinstance(value, FunctionType):
            cells = tuple(self._value(cell.cell_contents) for cell in value.__closure__ or () if _is_full(cell))
            defaults = (self._value(value.__defaults__ or ()), self._value(value.__kwdefaults__ or {}))
            return ("function", self._identity(value.__code__), cells, defaults)
        if getattr(type(value), "is_of_all_blocks", False):
            return self._identity(value)
        if type(value).__module__.partition(".")[0] == _PACKAGE and hasattr(value, "__dict__"):
            return ("ours", self._identity(type(value)), self._value(vars(value)))
        return self._identity(value)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None or True
    except ValueError:
        return False
