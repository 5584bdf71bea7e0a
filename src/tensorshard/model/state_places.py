"""What code can change outside of tensors: attributes, containers, generators of random numbers, and their contents.

A *place* is one such object together with its content at one time. The content is compared by identity, so looking at
a place costs about 25 ns an entry and calls no code of the user's.
"""

import random
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice, repeat
from operator import is_
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorshard.model.references import contents_of

_LARGE = 1000  # of a container with more entries only the number of entries is compared
_OURS = "_tensorshard"
_PLAIN_DICTS = (dict, OrderedDict, defaultdict)
_MISSING = object()

# What every module's ``__dict__`` holds. Hooks and registered tensors are not the user's state; ``training`` is.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"} | {"forward"}

Replaced = Mapping[int, Any]
"""Other tensors to put in the places of some, by the ids of the latter."""

HostStates = tuple[Any, Any]


class Place(ABC):
    """An object that code can change, and its content at one time."""

    values: Sequence[Any] = ()
    """What it held; empty if nothing of it can be changed further."""

    def leads_to(self) -> Sequence[Any]:
        """Those of the values in which there may be further places."""
        return self.values

    @abstractmethod
    def is_same(self) -> bool:
        """Whether the content is what it was."""

    @abstractmethod
    def now(self) -> "Place":
        """The same place, with its present content."""

    @abstractmethod
    def put(self, replaced: Replaced) -> None:
        """Gives the object the content that it had."""


def _same_values(holder: Any, values: Sequence[Any], kept: Sequence[Any]) -> bool:
    return len(holder) == len(kept) and (len(kept) > _LARGE or all(map(is_, values, kept)))  # type: ignore[arg-type]


class SamePlaces:
    """Says of many places at once whether all of them are the same, in about 2 us a block: in most calls they are.

    The contents of all plain dicts are compared in one pass, over views of them that are made once.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        tables = [place for place in places if isinstance(place, Attributes)]
        entries = [place for place in places if type(place) is Entries]
        empty = [place for place in entries if not place.keys]
        dicts = [place for place in entries if type(place.holder) in _PLAIN_DICTS and 0 < len(place.keys) <= _LARGE]
        compared = {id(place) for place in (*tables, *dicts, *empty)}
        self._empty = [place.holder for place in empty]
        self._others = [place.is_same for place in places if id(place) not in compared]
        self._holders = [*(place.holder for place in tables), *(place.holder for place in dicts)]
        self._sizes = [len(place.values) for place in (*tables, *dicts)]
        # What every module has comes first in its ``__dict__``, and is left out.
        self._firsts = [next((i for i, n in enumerate(p.names) if not _is_machinery(n)), len(p.names)) for p in tables]
        self._tables = [place.holder.values() for place in tables]
        self._views = [view for place in dicts for view in (place.holder.values(), place.holder.keys())]
        parts = [place.values[first:] for place, first in zip(tables, self._firsts, strict=True)]
        self._values = tuple(chain(*parts, *(part for place in dicts for part in (place.values, place.keys))))

    def hold(self) -> bool:
        """Whether all are the same."""
        views = chain(map(islice, self._tables, self._firsts, repeat(None)), self._views)
        return (
            list(map(len, self._holders)) == self._sizes
            and all(map(is_, chain.from_iterable(views), self._values))
            and not any(self._empty)
            and (not self._others or all(is_same() for is_same in self._others))
        )


class Attributes(Place):
    """The ``__dict__`` of a module or of another object."""

    def __init__(self, holder: dict[str, Any]) -> None:
        self.holder = holder
        self.names = tuple(holder)
        self.values = tuple(holder.values())

    def is_same(self) -> bool:
        holder, kept = self.holder, self.values
        return len(holder) == len(kept) and all(map(is_, holder.values(), kept))

    def leads_to(self) -> Sequence[Any]:
        return [value for name, value in zip(self.names, self.values, strict=True) if not _is_machinery(name)]

    def now(self) -> "Attributes":
        return Attributes(self.holder)

    def put(self, replaced: Replaced) -> None:
        kept = dict(zip(self.names, self.values, strict=True))
        for name in [name for name in self.holder if name not in kept]:
            if not _is_machinery(name):
                del self.holder[name]
        for name, value in kept.items():
            if not _is_machinery(name):
                self.holder[name] = replaced.get(id(value), value)


def _is_machinery(name: str) -> bool:
    return name in _OF_EVERY_MODULE or name.startswith(_OURS)


class Entries(Place):
    """A dict."""

    def __init__(self, holder: dict[Any, Any]) -> None:
        self.holder = holder
        self.keys = tuple(holder)
        self.values = tuple(holder.values())

    def is_same(self) -> bool:
        holder = self.holder
        return _same_values(holder, holder.values(), self.values) and _same_values(holder, holder, self.keys)  # type: ignore[arg-type]

    def now(self) -> "Entries":
        return Entries(self.holder)

    def put(self, replaced: Replaced) -> None:
        # Not by a subclass's methods, which may do more.
        kind: Any = OrderedDict if isinstance(self.holder, OrderedDict) else dict
        kind.clear(self.holder)
        for key, value in zip(self.keys, self.values, strict=True):
            kind.__setitem__(self.holder, key, replaced.get(id(value), value))


class _Elements(Place):
    """What a container holds, in its order."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.values = tuple(holder)

    def is_same(self) -> bool:
        return _same_values(self.holder, self.holder, self.values)


class Items(_Elements):
    """A list or a deque."""

    def now(self) -> "Items":
        return Items(self.holder)

    def put(self, replaced: Replaced) -> None:
        kind: Any = list if isinstance(self.holder, list) else deque
        kind.clear(self.holder)
        kind.extend(self.holder, [replaced.get(id(value), value) for value in self.values])


class Members(_Elements):
    """A set."""

    def now(self) -> "Members":
        return Members(self.holder)

    def put(self, replaced: Replaced) -> None:
        set.clear(self.holder)
        set.update(self.holder, self.values)


class Named(Place):
    """Some attributes of an object without a ``__dict__``, or of a class."""

    def __init__(self, holder: Any, names: tuple[str, ...]) -> None:
        self.holder = holder
        self.names = names
        self.values = tuple(getattr(holder, name, _MISSING) for name in names)

    def is_same(self) -> bool:
        return all(map(is_, map(getattr, repeat(self.holder), self.names, repeat(_MISSING)), self.values))

    def now(self) -> "Named":
        return Named(self.holder, self.names)

    def put(self, replaced: Replaced) -> None:
        for name, value in zip(self.names, self.values, strict=True):
            if value is not _MISSING:
                setattr(self.holder, name, replaced.get(id(value), value))
            elif hasattr(self.holder, name):
                delattr(self.holder, name)


class Variables(Place):
    """Some global variables of a file."""

    def __init__(self, namespace: dict[str, Any], names: tuple[str, ...]) -> None:
        self.namespace = namespace
        self.names = names
        self.values = tuple(namespace.get(name, _MISSING) for name in names)

    def is_same(self) -> bool:
        return all(map(is_, map(self.namespace.get, self.names, repeat(_MISSING)), self.values))

    def now(self) -> "Variables":
        return Variables(self.namespace, self.names)

    def put(self, replaced: Replaced) -> None:
        for name, value in zip(self.names, self.values, strict=True):
            if value is _MISSING:
                self.namespace.pop(name, None)
            else:
                self.namespace[name] = replaced.get(id(value), value)


class Enclosed(Place):
    """A variable of a function around the code (``nonlocal``)."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell
        self.values = (content_of(cell),)

    def is_same(self) -> bool:
        return content_of(self.cell) is self.values[0]

    def now(self) -> "Enclosed":
        return Enclosed(self.cell)

    def put(self, replaced: Replaced) -> None:
        if self.values[0] is not _MISSING:
            self.cell.cell_contents = replaced.get(id(self.values[0]), self.values[0])


def content_of(cell: CellType) -> Any:
    """What the variable holds, or an object that stands for nothing."""
    return next(iter(contents_of(cell)), _MISSING)


class Copied(Place):
    """An object of which a copy is kept: an array of numbers, or a generator of random numbers.

    Args:
        read: returns a copy of the content.
        write: gives the object such a content.
        equal: compares two.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any], equal: Callable[[Any, Any], bool]) -> None:
        self._read, self._write, self._equal = read, write, equal
        self.content = read()

    def is_same(self) -> bool:
        return self._equal(self._read(), self.content)

    def now(self) -> "Copied":
        return Copied(self._read, self._write, self._equal)

    def put(self, replaced: Replaced) -> None:
        self._write(self.content)


def copied_place(value: Any) -> Copied | None:
    """The place of a generator of random numbers, a numpy array or a bytearray; None for anything else."""
    if isinstance(value, random.Random):
        return Copied(value.getstate, value.setstate, _plainly_equal)
    if isinstance(value, torch.Generator):
        return Copied(value.get_state, value.set_state, torch.equal)
    if isinstance(value, bytearray):
        return Copied(lambda: bytes(value), lambda content: value.__setitem__(slice(None), content), _plainly_equal)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return Copied(lambda: value.get_state(legacy=False), value.set_state, _same_numbers)
    if isinstance(value, numpy.random.Generator):
        engine = value.bit_generator
        return Copied(lambda: engine.state, lambda content: setattr(engine, "state", content), _same_numbers)
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        return Copied(value.copy, lambda content: value.__setitem__(..., content), _same_bytes)
    return None


def shared_random_numbers(library: str) -> Copied:
    """The place of the random numbers that all code shares.

    Args:
        library: "random" for Python's own, "numpy" for numpy's.
    """
    if library == "random":
        return Copied(random.getstate, random.setstate, _plainly_equal)
    return Copied(numpy_random_state, set_numpy_random_state, _plainly_equal)


def _plainly_equal(one: Any, other: Any) -> bool:
    return bool(one == other)


def _same_bytes(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and one.tobytes() == other.tobytes())


def _same_numbers(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_numbers(one[key], other[key]) for key in one)
    return _same_bytes(one, other) if hasattr(one, "tobytes") else bool(one == other)


def host_random_states() -> HostStates:
    """The states of Python's and of numpy's global generator. They are equal if nothing was drawn in between."""
    return random.getstate(), numpy_random_state()


def set_host_random_states(states: HostStates) -> None:
    """Puts back what :func:`host_random_states` returned."""
    random.setstate(states[0])
    set_numpy_random_state(states[1])


def numpy_random_state() -> Any:
    """The state of numpy's global generator, of plain values that can be compared."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return name, keys.tobytes(), *rest


def set_numpy_random_state(state: Any) -> None:
    """Puts back what :func:`numpy_random_state` returned."""
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


@contextmanager
def host_random_restored() -> Iterator[None]:
    """Leaves both generators as they were."""
    states = host_random_states()
    try:
        yield
    finally:
        set_host_random_states(states)
