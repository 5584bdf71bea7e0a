"""What a model's code keeps outside of its modules: results of functions, and tensors in global variables.

Position indices and masks are often made once and kept: by ``functools.lru_cache``, in a dictionary at the top of a
file, in an attribute of a class, in a default argument. Results of a run on fake tensors must not be kept: the model
would compute with them later.
"""

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from tensorshard.model.reachable_state import is_foreign
from tensorshard.model.references import contents_of
from tensorshard.model.state_places import Entries, Items, Members, Place

_CONTAINERS: dict[type, type[Place]] = {
    dict: Entries, OrderedDict: Entries, defaultdict: Entries, list: Items, deque: Items, set: Members,
}  # fmt: skip
_DEPTH = 3  # of containers within each other
_MOST_ITEMS = 1000  # of a container that is looked at: larger ones are tables of names
_NOTHING = object()


@contextmanager
def restored_globals(model: nn.Module) -> Iterator[None]:
    """At its end, makes the model's code forget what it began to keep inside.

    It finds functions and variables in the Python modules that define the classes of `model`, and in these classes, and
    functions in attributes of the instances. Of a memoized function other results are forgotten too, and are computed
    again when they are needed. Of variables, and containers in them, only what holds tensors is put back.
    """
    before = [(function, function.cache_info().misses) for function in _memoized(model)]
    known = {id(function) for function, _ in before}
    variables = [_Variables(place) for place in _shared_places(model)]
    try:
        yield
    finally:
        for each in variables:
            each.put_back()
        for function, misses in before:
            if function.cache_info().misses != misses:
                function.cache_clear()
        for function in _memoized(model):
            if id(function) not in known:
                function.cache_clear()


def _shared_places(model: nn.Module) -> list[Any]:
    """The Python modules and the classes that `model`'s code is in."""
    places: dict[int, Any] = {}
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if not is_foreign(kind.__module__):
            places[id(kind)] = kind
            source = sys.modules.get(kind.__module__)
            if source is not None:
                places[id(source)] = source
    return list(places.values())


def _memoized(model: nn.Module) -> list[Any]:
    places = [*model.modules(), *_shared_places(model)]
    values = [inner for place in places for value in list(vars(place).values()) for inner in _unwrapped(value)]
    return list({id(value): value for value in values if _is_memoized(value)}.values())


class _Variables:
    """The variables of a Python module or a class, and the contents of containers in them.

    Args:
        place: the module or the class.
    """

    def __init__(self, place: Any) -> None:
        self._place, self._values = place, dict(vars(place))
        self._containers: list[tuple[Any, Place]] = []
        seen: set[int] = set()
        for value in self._values.values():
            self._note(value, _DEPTH, seen)

    def _note(self, value: Any, depth: int, seen: set[int]) -> None:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, FunctionType):
            contents: Any = (value.__defaults__, value.__kwdefaults__, vars(value))
        elif type(value) in _CONTAINERS:
            if len(value) > _MOST_ITEMS:
                return
            contents = value
        elif type(value) is tuple:
            contents = value
        else:
            return
        if not depth or id(value) in seen:
            return
        seen.add(id(value))
        container = vars(value) if isinstance(value, FunctionType) else value
        if type(container) in _CONTAINERS:
            self._containers.append((container, _CONTAINERS[type(container)](container)))  # type: ignore[call-arg]
        for inner in list(contents.values() if isinstance(contents, dict) else contents):
            if inner is not None:
                self._note(inner, depth - 1, seen)

    def put_back(self) -> None:
        """Puts back what has changed to something that holds tensors."""
        for container, before in self._containers:
            if not before.is_same() and _holds_tensors(container, _DEPTH):
                before.put({})
        for name, value in list(vars(self._place).items()):
            if value is self._values.get(name, _NOTHING) or not _holds_tensors(value, _DEPTH):
                continue
            if name in self._values:
                setattr(self._place, name, self._values[name])
            else:
                delattr(self._place, name)


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if not depth:
        return False
    if isinstance(value, dict):
        return any(_holds_tensors(inner, depth - 1) for inner in list(value.values()))
    if isinstance(value, list | tuple | set | deque):
        return any(_holds_tensors(inner, depth - 1) for inner in value)
    kept = getattr(value, "__dict__", None)
    if isinstance(value, type | ModuleType | FunctionType) or type(kept) is not dict:
        return False
    return _holds_tensors(kept, depth - 1)


def _unwrapped(value: Any) -> list[Any]:
    """`value`, and the functions that a decorator has wrapped."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if not isinstance(value, FunctionType):
        return [value]
    return [value, *(inner for cell in value.__closure__ or () for inner in contents_of(cell))]


def _is_memoized(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "cache_clear") and hasattr(kind, "cache_info")
