"""Functions of a model's code that remember what they returned (``functools.lru_cache``).

Position indices and masks are often made once and kept. Results of a run on fake tensors must not be kept: the model
would compute with them later.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

from torch import nn


@contextmanager
def nothing_remembered(model: nn.Module) -> Iterator[None]:
    """At its end, makes the model's memoized functions forget the results that were added inside.

    It finds functions in the modules that define the classes of `model`, methods of these classes, and attributes of
    the instances. Their other results are forgotten too, and are computed again when they are needed.
    """
    before = [(function, function.cache_info().misses) for function in _memoized(model)]
    known = {id(function) for function, _ in before}
    try:
        yield
    finally:
        for function, misses in before:
            if function.cache_info().misses != misses:
                function.cache_clear()
        for function in _memoized(model):
            if id(function) not in known:
                function.cache_clear()


def _memoized(model: nn.Module) -> list[Any]:
    places: dict[int, dict[str, Any]] = {}
    for module in model.modules():
        places[id(module)] = vars(module)
        for kind in type(module).__mro__:
            if not kind.__module__.startswith(("torch.", "builtins")):
                places[id(kind)] = dict(vars(kind))
                source = sys.modules.get(kind.__module__)
                if source is not None:
                    places[id(source)] = vars(source)
    values = [inner for place in places.values() for value in list(place.values()) for inner in _unwrapped(value)]
    return list({id(value): value for value in values if _is_memoized(value)}.values())


def _unwrapped(value: Any) -> list[Any]:
    """`value`, and the functions that a decorator has wrapped."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if not isinstance(value, FunctionType):
        return [value]
    return [value, *(cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))]


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_memoized(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "cache_clear") and hasattr(kind, "cache_info")
