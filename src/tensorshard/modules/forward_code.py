"""What the code of a class's forward uses: functions, global variables, enclosing variables, random numbers.

The code itself is read, not run: the names in the forward, and in the methods and functions that its names lead to.
"""

import dis
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_FOREIGN = ("torch", "tensorshard", "numpy", "builtins")


@dataclass
class UsedByCode:
    """What some classes' forwards use.

    Args:
        variables: names of global variables that they may assign to, or change, with the file's namespace.
        enclosed: functions, which may use variables of enclosing functions.
        names: of all functions, methods, attributes and global variables that they use.
        writes_items: whether they write to parts of something, as in ``a[i] = b``.
        draws: "random" and "numpy", if they may draw from the random numbers that all code shares.
    """

    variables: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    enclosed: list[FunctionType] = field(default_factory=list)
    draws: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    writes_items: bool = False


def used_by_forwards(classes: set[type[nn.Module]]) -> UsedByCode:
    """What the forwards of `classes` use; torch's and this package's own code is left out."""
    found = UsedByCode()
    seen: set[CodeType] = set()
    assigned: dict[tuple[int, str], dict[str, Any]] = {}
    for cls in classes:
        queue: list[Any] = [cls.forward]
        while queue:
            function = queue.pop()
            if not isinstance(function, FunctionType) or function.__code__ in seen or is_foreign(function.__module__):
                continue
            seen.add(function.__code__)
            queue.append(getattr(function, "__wrapped__", None))  # a decorator such as torch.autocast is around it
            found.names |= set(function.__code__.co_freevars)
            found.enclosed.append(function)
            namespace = function.__globals__
            for code in _nested(function.__code__):
                found.names |= set(code.co_names)
                found.writes_items |= any(step.opname == "STORE_SUBSCR" for step in dis.get_instructions(code))
                for name in _assigned(code):
                    assigned[id(namespace), name] = namespace
                for name in code.co_names:
                    value = namespace.get(name)
                    found.draws |= _draws(name, value, code)
                    if isinstance(value, FunctionType):
                        queue.append(value)
                    elif _may_be_changed(value):
                        assigned[id(namespace), name] = namespace
                    method = getattr(cls, name, None)
                    if isinstance(method, property):
                        method = method.fget
                    queue.append(getattr(method, "__func__", method))
    found.variables = [(namespace, name) for (_, name), namespace in assigned.items()]
    return found


def forward_classes(cls: type[nn.Module]) -> set[type[nn.Module]]:
    """The classes of `cls`'s own code, without torch's and this package's."""
    return {base for base in cls.__mro__ if issubclass(base, nn.Module) and not is_foreign(base.__module__)}


def draws_on_host(model: nn.Module) -> bool:
    """Whether the code of `model` draws from Python's or numpy's global random numbers. Decorators that check types
    draw, too, which changes no result."""
    return bool(used_by_forwards({base for module in model.modules() for base in forward_classes(type(module))}).draws)


def variables_around(function: FunctionType) -> Iterator[tuple[CellType, bool]]:
    """The variables of enclosing functions that `function` uses, and whether it may assign to each."""
    cells = function.__closure__
    if cells:
        steps = (step for code in _nested(function.__code__) for step in dis.get_instructions(code))
        assigned = {step.argval for step in steps if step.opname in ("STORE_DEREF", "DELETE_DEREF")}
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            yield cell, name in assigned


def is_foreign(module: str | None) -> bool:
    """Whether code or a class of `module` is torch's, the standard library's or this package's, whose objects are not
    looked into."""
    root = (module or "").partition(".")[0]
    return (root in _FOREIGN and not (module or "").startswith("tensorshard.models")) or root in sys.stdlib_module_names


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _assigned(code: CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}


def _may_be_changed(value: Any) -> bool:
    """Whether a global variable's value is a container, a tensor, or an object that may have a state."""
    if value is None or isinstance(value, ModuleType | type | FunctionType):
        return False
    return isinstance(value, dict | list | set | torch.Tensor | nn.Module) or not is_foreign(type(value).__module__)


def _draws(name: str, value: Any, code: CodeType) -> set[str]:
    if value is random or (isinstance(value, BuiltinMethodType) and isinstance(value.__self__, random.Random)):
        return {"random"}
    if isinstance(value, MethodType) and type(value.__self__) is random.Random:
        return {"random"}
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return set()
    used = value is numpy and "random" in code.co_names
    return {"numpy"} if used or value is numpy.random else set()
