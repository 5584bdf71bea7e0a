"""References to a model's parameters and buffers beside their registrations, which follow these.

A forward may read a parameter through a list, a closure, a bound method, or an object that is no module (a variable of
keras). Where the registered tensor is replaced, for whatever reason and for however long, each such reference gets the
new one: :func:`~tensorshard.torch_private.modules.set_parameter` and ``set_buffer`` look for those of the module.
Containers and objects stay the same ones, so that whoever shares them goes on to do so; tuples and the like are made
again in what holds them.
"""

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator
from enum import Enum
from logging import Logger
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.common.words import kind_of
from tensorshard.torch_private.modules import (
    RECURRENT_LISTS,
    REFERENCES,
    TABLES,
    every_module,
    own_buffers,
    own_parameters,
)

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


_LEAVES = (*ATOMIC, torch.Generator, weakref.ProxyType, weakref.CallableProxyType)
_OFTEN_EMPTY = frozenset((dict, list, set, tuple, OrderedDict))
_LIMIT = 2_000_000  # objects that are looked into; models have thousands
Swap = Callable[[torch.Tensor], torch.Tensor]


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


class Reference:
    """A changeable place. Its value is a tensor, or leads to tensors through objects that cannot be changed.

    Args:
        holder: the object that holds the value.
        key: of the value in it.
        path: attributes that lead to the value, from the model's.
    """

    def __init__(self, holder: Any, key: Any, path: str) -> None:
        self.holder, self.key, self.path = holder, key, path

    def get(self) -> Any:
        """The value; raises LookupError or AttributeError if it is gone."""
        return self.holder[self.key]

    def put(self, value: Any) -> None:
        """Puts a value there."""
        self.holder[self.key] = value

    def described(self) -> str:
        """The place and its holder's class, for errors."""
        return f"{self.path!r} (of {kind_of(self.holder)})"


class _Attribute(Reference):
    def get(self) -> Any:
        return vars(self.holder)[self.key]

    def put(self, value: Any) -> None:
        vars(self.holder)[self.key] = value


class _Slot(Reference):
    """The key is the class, and the name of its descriptor."""

    def get(self) -> Any:
        kind, name = self.key
        return vars(kind)[name].__get__(self.holder)

    def put(self, value: Any) -> None:
        kind, name = self.key
        vars(kind)[name].__set__(self.holder, value)


class _Members(Reference):
    """What a set holds, or a dict that has tensors as keys."""

    def get(self) -> Any:
        return tuple(self.holder.items()) if hasattr(self.holder, "items") else tuple(self.holder)

    def put(self, value: Any) -> None:
        self.holder.clear()
        self.holder.update(value)


class _Cell(Reference):
    """The key is the cell's index in a function's closure."""

    def get(self) -> Any:
        try:
            return self.holder.__closure__[self.key].cell_contents
        except ValueError as empty:
            raise LookupError from empty

    def put(self, value: Any) -> None:
        self.holder.__closure__[self.key].cell_contents = value


class _Defaults(Reference):
    def get(self) -> Any:
        return self.holder.__defaults__

    def put(self, value: Any) -> None:
        self.holder.__defaults__ = value


class _Keyword(Reference):
    """The key is the attribute that has the dict of a function or ``functools.partial``, and the key in it."""

    def get(self) -> Any:
        attribute, name = self.key
        return getattr(self.holder, attribute)[name]

    def put(self, value: Any) -> None:
        attribute, name = self.key
        getattr(self.holder, attribute)[name] = value


class _Arguments(Reference):
    """The function and the positional arguments of a ``functools.partial``."""

    def get(self) -> Any:
        return self.holder.func, self.holder.args

    def put(self, value: Any) -> None:
        function, args = value
        self.holder.__setstate__((function, args, self.holder.keywords, vars(self.holder)))


class References:
    """The references to the tensors that one module registers, by the names that these have there."""

    def __init__(self) -> None:
        self.of: dict[str, list[Reference]] = {}

    def replace(self, name: str, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        """Puts `new` where the references of `name` are to `old`. What code has put there since stays."""
        places = self.of.get(name)
        if places is None or old is None or new is None or old is new:
            return
        made: dict[int, Any] = {}
        for place in places:
            swap_in(place, lambda tensor: new if tensor is old else tensor, made)


def swap_in(place: Reference, swap: Swap, made: dict[int, Any]) -> None:
    """Puts ``swap(tensor)`` in the place of each tensor there.

    Args:
        made: what was made again for other places, by the ``id`` of the original, so that it stays shared.
    """
    try:
        value = place.get()
    except (LookupError, AttributeError, TypeError, IndexError):
        return  # it is gone
    again = _swapped(value, swap, made)
    if again is not value:
        place.put(again)


def note_references(model: nn.Module) -> None:
    """Makes all references to the tensors that `model` registers follow them."""
    registered: dict[int, list[tuple[nn.Module, str]]] = {}
    modules = list(every_module(model).values())
    for module in modules:
        vars(module).pop(REFERENCES, None)
        for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
            registered.setdefault(id(tensor), []).append((module, name))
    for place, tensors in references_to(model, lambda tensor: id(tensor) in registered):
        for module, name in {key: None for tensor in tensors for key in registered[id(tensor)]}:
            places: References = vars(module).setdefault(REFERENCES, References())
            places.of.setdefault(name, []).append(place)


def update_references(module: nn.Module, name: str, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
    """Tells the references of ``module.name`` that `new` was put in the place of `old`, by whatever way."""
    places: References | None = vars(module).get(REFERENCES)
    if places is not None:
        places.replace(name, old, new)


def references_to(root: Any, wanted: Callable[[torch.Tensor], bool]) -> Iterator[tuple[Reference, list[torch.Tensor]]]:
    """Every reference that `root` leads to and whose value has `wanted` tensors in it, with these.

    Registrations in a model's modules are none. Classes, modules of Python and globals are not looked into.
    """
    modules = every_module(root).items() if isinstance(root, nn.Module) else ()
    registered = {id(module): path for path, module in modules}
    waiting: deque[tuple[Any, str]] = deque((module, path) for path, module in modules)
    if not isinstance(root, nn.Module):
        waiting.extend((inner, "") for inner in _entered(root))
    seen: set[int] = set(registered)
    kept: list[Any] = []  # so that no other object gets the id of one
    while waiting and len(kept) < _LIMIT:
        holder, path = waiting.popleft()
        for place, value in _references(holder, path, id(holder) in registered):
            tensors = [tensor for tensor in _tensors(value) if wanted(tensor)]
            if tensors:
                yield place, tensors
            for inner in _entered(value):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    kept.append(inner)
                    waiting.append((inner, place.path))


def holds(value: Any, ids: Container[int]) -> bool:
    """Whether `value` is, or leads to, one of the tensors with these ``id``."""
    if any(id(tensor) in ids for tensor in _tensors(value)):
        return True
    return any(True for _ in references_to(value, lambda tensor: id(tensor) in ids))


def _references(holder: Any, path: str, registered: bool) -> Iterator[tuple[Reference, Any]]:
    """The changeable places of one object, with their values."""
    prefix = f"{path}." if path else ""
    kind = type(holder)
    if isinstance(holder, dict | weakref.WeakValueDictionary):
        if isinstance(holder, dict) and any(not isinstance(key, _LEAVES) for key in holder):
            yield from _with_value(_Members(holder, None, path))
        else:
            for key, value in list(holder.items()):
                if not isinstance(value, _LEAVES):
                    yield Reference(holder, key, f"{path}[{key!r}]"), value
    elif isinstance(holder, list | deque):
        for index, value in enumerate(list(holder)):
            if not isinstance(value, _LEAVES):
                yield Reference(holder, index, f"{path}[{index}]"), value
    elif isinstance(holder, set | weakref.WeakSet | weakref.WeakKeyDictionary):
        yield from _with_value(_Members(holder, None, path))
    elif kind is FunctionType:
        for index, name in enumerate(holder.__code__.co_freevars):
            yield from _with_value(_Cell(holder, index, f"{prefix}{name}"))
        if holder.__defaults__:
            yield from _with_value(_Defaults(holder, None, f"{prefix}__defaults__"))
        for name, value in (holder.__kwdefaults__ or {}).items():
            yield _Keyword(holder, ("__kwdefaults__", name), f"{prefix}{name}"), value
    elif kind.__name__ == "partial" and hasattr(holder, "keywords"):
        yield from _with_value(_Arguments(holder, None, f"{prefix}args"))
        for name, value in holder.keywords.items():
            yield _Keyword(holder, ("keywords", name), f"{prefix}{name}"), value
    if not isinstance(holder, WEAK_CONTAINERS):
        yield from _attributes(holder, prefix, registered)


def _attributes(holder: Any, prefix: str, registered: bool) -> Iterator[tuple[Reference, Any]]:
    try:
        attributes = vars(holder)
    except TypeError:
        attributes = {}
    if type(attributes) is not dict:
        return
    skipped: tuple[str, ...] = (*TABLES, REFERENCES) if registered else ()
    if registered and isinstance(holder, nn.RNNBase):
        skipped += RECURRENT_LISTS
    for name, value in list(attributes.items()):
        if name not in skipped and not isinstance(value, _LEAVES):
            yield _Attribute(holder, name, f"{prefix}{name}"), value
    for kind, name in slots_of(holder):
        yield from _with_value(_Slot(holder, (kind, name), f"{prefix}{name}"))


def _with_value(place: Reference) -> Iterator[tuple[Reference, Any]]:
    try:
        yield place, place.get()
    except (LookupError, AttributeError):
        return


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that `value` is or holds without a changeable object in between."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | frozenset):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, weakref.ref):
        yield from _tensors(value()) if isinstance(value(), torch.Tensor) else ()
    elif isinstance(value, MethodType | BuiltinFunctionType) and isinstance(value.__self__, torch.Tensor):
        yield value.__self__


def _entered(value: Any) -> Iterator[Any]:
    """The objects with changeable places that `value` is or holds."""
    if isinstance(value, _LEAVES):
        return
    if isinstance(value, torch.Tensor):
        return
    if type(value) in _OFTEN_EMPTY and not value:  # as each module has a dozen of, for hooks
        return
    if isinstance(value, tuple | frozenset):
        for item in value:
            yield from _entered(item)
        if hasattr(value, "__dict__"):
            yield value
    elif isinstance(value, weakref.ref):
        yield from _entered(value())
    elif isinstance(value, MethodType):
        yield from _entered(value.__self__)
        yield from _entered(value.__func__)
    elif not isinstance(value, BuiltinFunctionType):
        yield value


def _swapped(value: Any, swap: Swap, made: dict[int, Any]) -> Any:
    """`value` with other tensors; itself if they are the same."""
    if isinstance(value, torch.Tensor):
        return swap(value)
    if not isinstance(value, tuple | frozenset | weakref.ref | MethodType | BuiltinFunctionType):
        return value
    if id(value) not in made:
        made[id(value)] = value, _made_again(value, swap, made)  # the original is kept with its id
    return made[id(value)][1]


def _made_again(value: Any, swap: Swap, made: dict[int, Any]) -> Any:
    if isinstance(value, tuple | frozenset):
        items = [_swapped(item, swap, made) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        if isinstance(value, frozenset):
            return type(value)(items)
        again: Any = tuple.__new__(type(value), items)
        if hasattr(value, "__dict__"):
            vars(again).update(vars(value))
        return again
    if isinstance(value, weakref.ref):
        tensor = value()
        if not isinstance(tensor, torch.Tensor) or swap(tensor) is tensor:
            return value
        return weakref.ref(swap(tensor), value.__callback__)
    tensor = value.__self__
    if not isinstance(tensor, torch.Tensor) or swap(tensor) is tensor:
        return value
    if isinstance(value, MethodType):
        return MethodType(value.__func__, swap(tensor))
    return getattr(swap(tensor), value.__name__)
