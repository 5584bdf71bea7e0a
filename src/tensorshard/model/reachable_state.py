"""Finds what the forward of some modules may change beside weights: their attributes, and what these lead to."""

import dis
import functools
import random
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from tensorshard.model.references import ATOMIC_TYPES, slots_of
from tensorshard.model.state_places import (
    Attributes,
    Copied,
    Enclosed,
    Entries,
    Items,
    Members,
    Named,
    Place,
    SamePlaces,
    Variables,
    content_of,
    copied_place,
)
from tensorshard.torch_private.modules import buffer_table, forward_hooks

_DEPTH = 5  # how many objects that hold each other are followed from a module's attribute or an argument

_FOREIGN = ("torch", "tensorshard", "numpy", "builtins")


class Reached:
    """What can be reached, as it is now.

    Attributes:
        places: what holds values.
        copied: generators of random numbers and arrays, of which copies were made.
        tensors: what may be written to in place; not parameters, nor the buffers of the modules themselves.
        keeps_graph: whether a tensor among the values has a graph.
        once: the class of an object that can be read once only, such as a generator; None if there is none.
    """

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.copied: list[Copied] = []
        self.tensors: list[torch.Tensor] = []
        self.keeps_graph = False
        self.once: str | None = None
        self._seen: dict[int, Any] = {}  # the objects are kept, or another might get the same id

    @functools.cached_property
    def same(self) -> SamePlaces:
        """Says whether the places are the same, once all were added."""
        return SamePlaces(self.places)

    def is_seen(self, value: Any) -> bool:
        """Whether `value` was met before; from now on it was."""
        if id(value) in self._seen:
            return True
        self._seen[id(value)] = value
        return False


class StateOfModules:
    """Looks for the state of a block's modules.

    Args:
        modules: the block with all modules in it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._ids = {id(module) for module in self._modules}
        # torch's layers keep no state of their own; what a subclass's forward does is unknown.
        self._users = [module for module in self._modules if not is_foreign(type(module).__module__)]
        classes = dict.fromkeys(cls for module in self._users for cls in forward_classes(type(module)))
        hooks = [hook for module in self._modules for hook in forward_hooks(module) if not is_foreign(_file_of(hook))]
        self._code = used_by_forwards(classes, hooks)
        self._holders = [getattr(hook, "__self__", hook) for hook in hooks if not isinstance(hook, FunctionType)]
        self._enclosed = [pair for function in self._code.enclosed for pair in variables_around(function)]
        self._data = {cls: names for cls in classes if (names := _data_of(cls))}

    @property
    def draws(self) -> set[str]:
        """ "random" and "numpy", if the code may draw from the random numbers that all code shares."""
        return self._code.draws

    def reach(self) -> Reached:
        """What the modules reach."""
        reached = Reached()
        for module in self._users:
            reached.is_seen(module)
            self._add(reached, Attributes(vars(module)), 0)
            reached.places.append(Entries(buffer_table(module)))  # a forward may register one
        for cls, names in self._data.items():
            self._add(reached, Named(cls, names), 0)
        for namespace, name in self._code.variables:
            self._add(reached, Variables(namespace, (name,)), 0)
        for cell, assigned in self._enclosed:
            if assigned:
                self._add(reached, Enclosed(cell), 0)
            else:
                self._visit(reached, content_of(cell), 1)
        for holder in self._holders:
            self._visit(reached, holder, 0)
        return reached

    def reach_from(self, values: Iterable[Any]) -> Reached:
        """What `values`, a call's arguments, reach. Tensors among them belong to the caller."""
        reached = Reached()
        for value in values:
            if type(value) not in ATOMIC_TYPES and not isinstance(value, torch.Tensor):
                self._visit(reached, value, 0)
        return reached

    def _add(self, reached: Reached, place: Place, depth: int) -> None:
        reached.places.append(place)
        if depth < _DEPTH:
            for value in place.leads_to():
                if type(value) not in ATOMIC_TYPES:
                    self._visit(reached, value, depth + 1)

    def _visit(self, reached: Reached, value: Any, depth: int) -> None:
        if type(value) in ATOMIC_TYPES or reached.is_seen(value):
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                reached.keeps_graph |= value.grad_fn is not None
                is_absent = getattr(value, "is_absent", False)  # it stands in for what another rank has
                if (depth <= 1 or value.grad_fn is None) and not is_absent:  # lists of results are not copied
                    reached.tensors.append(value)
        elif isinstance(value, nn.Module):
            self._visit_module(reached, value, depth)
        elif isinstance(value, dict):
            self._add(reached, Entries(value), depth)
            if type(value) is not dict and not is_foreign(type(value).__module__):
                reached.places.append(Attributes(vars(value)))
        elif isinstance(value, list | deque):
            self._add(reached, Items(value), depth)
        elif isinstance(value, set):
            self._add(reached, Members(value), depth)
        elif isinstance(value, tuple | frozenset):
            for inner in value if depth < _DEPTH else ():
                self._visit(reached, inner, depth + 1)
        elif isinstance(value, weakref.ReferenceType):
            self._visit(reached, value(), depth)
        elif isinstance(value, MethodType):
            self._visit(reached, value.__self__, depth)
        elif isinstance(value, functools.partial):
            self._visit(reached, (value.func, *value.args, *value.keywords.values()), depth)
        elif isinstance(value, FunctionType):
            self._visit_function(reached, value, depth)
        elif (copied := copied_place(value)) is not None:
            reached.copied.append(copied)
        elif isinstance(value, Iterator) and not hasattr(value, "read"):
            reached.once = type(value).__name__
        elif not isinstance(value, type):
            self._visit_object(reached, value, depth)

    def _visit_function(self, reached: Reached, function: FunctionType, depth: int) -> None:
        if depth < _DEPTH and function.__closure__ and not is_foreign(function.__module__):
            for cell, assigned in variables_around(function):
                if assigned:
                    self._add(reached, Enclosed(cell), depth)
                else:
                    self._visit(reached, content_of(cell), depth + 1)

    def _visit_module(self, reached: Reached, module: nn.Module, depth: int) -> None:
        """A module that is not in the block, such as its parent, or one that is kept in a list."""
        if id(module) in self._ids or is_foreign(type(module).__module__):
            return
        inside = list(module.modules())
        around = any(id(inner) in self._ids for inner in inside)
        for other in [module] if around else inside:
            if other is module or not reached.is_seen(other):
                self._add(reached, Attributes(vars(other)), depth)
                self._add(reached, Entries(buffer_table(other)), depth)  # type: ignore[arg-type]

    def _visit_object(self, reached: Reached, value: Any, depth: int) -> None:
        if is_foreign(type(value).__module__) and type(value).__module__ not in ("types", "collections"):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._add(reached, Attributes(attributes), depth)
        names = tuple(name for _, name in slots_of(value))
        if names:
            self._add(reached, Named(value, names), depth)


def _data_of(cls: type) -> tuple[str, ...]:
    """The names of a class's own attributes that are values, not code."""
    if is_foreign(cls.__module__):
        return ()
    return tuple(
        name
        for name, value in vars(cls).items()
        if not name.startswith("__")
        and not callable(value)
        and not hasattr(type(value), "__get__")
        and not (isinstance(value, tuple | frozenset) and all(type(one) in ATOMIC_TYPES for one in value))
    )


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


def used_by_forwards(classes: Iterable[type[nn.Module]], hooks: Iterable[Any] = ()) -> UsedByCode:
    """What the forwards of `classes` and `hooks` use; torch's and this package's own code is left out.

    The code is read, not run: the names in the forwards, and in the methods and functions that these lead to.
    """
    used = UsedByCode()
    seen: set[CodeType | FunctionType] = set()
    assigned: dict[tuple[int, str], dict[str, Any]] = {}
    for cls, first in [*((cls, cls.forward) for cls in classes), *((type(None), hook) for hook in hooks)]:
        queue: list[Any] = [getattr(first, "__func__", first)]
        while queue:
            function = queue.pop()
            if not isinstance(function, FunctionType) or is_foreign(function.__module__):
                continue
            own = function if function.__closure__ else function.__code__  # closures of one code have other variables
            if own in seen:
                continue
            seen.add(own)
            queue.append(getattr(function, "__wrapped__", None))  # a decorator such as torch.autocast is around it
            used.names |= set(function.__code__.co_freevars)
            used.enclosed.append(function)
            namespace = function.__globals__
            for code in _nested(function.__code__):
                used.names |= set(code.co_names)
                used.writes_items |= any(step.opname == "STORE_SUBSCR" for step in dis.get_instructions(code))
                for name in _assigned(code):
                    assigned[id(namespace), name] = namespace
                for name in code.co_names:
                    value = namespace.get(name)
                    used.draws |= _draws(name, value, code)
                    if isinstance(value, FunctionType):
                        queue.append(value)
                    elif _may_be_changed(value):
                        assigned[id(namespace), name] = namespace
                    method = getattr(cls, name, None)
                    if isinstance(method, property):
                        method = method.fget
                    queue.append(getattr(method, "__func__", method))
    used.variables = [(namespace, name) for (_, name), namespace in assigned.items()]
    return used


def _file_of(hook: Any) -> str | None:
    """The name of the module that a hook, or the object that is one, is from."""
    return getattr(hook, "__module__", None) or type(hook).__module__


def forward_classes(cls: type[nn.Module]) -> list[type[nn.Module]]:
    """The classes of `cls`'s own code, without torch's and this package's."""
    return [base for base in cls.__mro__ if issubclass(base, nn.Module) and not is_foreign(base.__module__)]


def draws_on_host(model: nn.Module) -> bool:
    """Whether the code of `model` draws from Python's or numpy's global random numbers. Decorators that check types
    draw, too, which changes no result."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in forward_classes(type(module)))
    return bool(used_by_forwards(classes).draws)


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
