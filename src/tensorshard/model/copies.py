"""Copies of modules that a user's code cannot tell from the original, and that share no changing state with it.

:func:`copy.deepcopy` is not enough. It leaves functions as they are, so that a lambda over a block's modules would run
the original's; it fails on attributes that nothing can copy (a lock, a Python module, a logger); and under a fake mode
it fails on plain tensors.
"""

import copy
import copyreg
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from tensorshard.model.references import ATOMIC, WEAK_CONTAINERS, WEAK_REFERENCES, contents_of, holds
from tensorshard.torch_private.fake_tensors import FakeTensor, unset_fake_temporarily

_Module = TypeVar("_Module", bound=nn.Module)

_SHARED = (*ATOMIC, BuiltinFunctionType)
_HEAP_TYPE = 1 << 9  # of a class's flags: it was made by a class statement


def copy_module(module: _Module, replacements: Mapping[int, Any]) -> _Module:
    """A copy of `module` and of all that its attributes lead to.

    - What two attributes shared in the original, they share in the copy.
    - Functions that refer to copied objects, by their closures or defaults, are made again around the copies.
    - What cannot be copied is shared.
    - A tensor that is the result of a computation (what the older ``weight_norm`` keeps) is copied without its graph.

    Args:
        replacements: for objects, by their ``id``; usually the tensors of the copy.
    """
    return _Copier(module, replacements).copied()


class _Copier:
    def __init__(self, root: nn.Module, replacements: Mapping[int, Any]) -> None:
        self._root = root
        self._made: dict[int, Any] = dict(replacements)
        self._replaced = frozenset(replacements)
        self._originals: list[Any] = []  # kept, so that no other object gets the id of one
        self._modules = {id(module) for module in root.modules()}
        self._functions: list[tuple[FunctionType, FunctionType]] = []

    def copied(self) -> Any:
        copied = self.copy(self._root)
        for function, again in self._functions:
            self._fill(function, again)
        return copied

    def copy(self, value: Any) -> Any:
        if type(value) is BuiltinFunctionType and isinstance(value.__self__, torch.Tensor):
            return getattr(self.copy(value.__self__), value.__name__)
        if type(value) not in WEAK_REFERENCES and isinstance(value, _SHARED):
            return value
        key = id(value)
        if key in self._made:
            return self._made[key]
        self._originals.append(value)
        made = self._copy(value)
        self._made[key] = made
        return made

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in WEAK_REFERENCES:  # asked first: a proxy is an instance of what it stands for
            return self._copy_weak(value)
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if isinstance(value, nn.Module) and not hasattr(kind, "__deepcopy__"):
            return self._copy_attributes(value, self._keep(value, object.__new__(kind)))
        if kind is dict or kind is OrderedDict:
            made = self._keep(value, kind())
            made.update((self.copy(key), self.copy(item)) for key, item in value.items())
            return made
        if kind is list:
            made = self._keep(value, [])
            made.extend(map(self.copy, value))
            return made
        if kind is tuple:
            items = tuple(map(self.copy, value))
            return value if all(a is b for a, b in zip(items, value, strict=True)) else self._made.get(id(value), items)
        if kind in (set, frozenset):
            return kind(map(self.copy, value))
        if kind is FunctionType:
            return self._copy_function(value)
        if kind is MethodType:
            return MethodType(value.__func__, self.copy(value.__self__))
        if kind is partial:
            keywords = {name: self.copy(given) for name, given in value.keywords.items()}
            again = partial(self.copy(value.func), *map(self.copy, value.args), **keywords)
            vars(again).update((name, self.copy(item)) for name, item in vars(value).items())
            return again
        if kind in WEAK_CONTAINERS:
            return self._copy_weak_container(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        return self._copy_object(value)

    def _keep(self, value: Any, made: Any) -> Any:
        """Notes the copy of `value` before its contents are copied, which may lead back to it."""
        self._made[id(value)] = made
        return made

    def _copy_attributes(self, value: Any, made: Any) -> Any:
        attributes = vars(made)
        for name, item in vars(value).items():
            attributes[name] = OrderedDict() if type(item) is OrderedDict and not item else self.copy(item)
        return made

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):  # `Tensor.__deepcopy__` would copy its mode
            return tensor.detach().clone()
        with unset_fake_temporarily():
            if not tensor.is_leaf:
                return tensor.detach().clone()
            try:
                return copy.deepcopy(tensor, self._made)
            except (NotImplementedError, RuntimeError):  # of a storage that torch cannot copy
                return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def _copy_weak(self, value: Any) -> Any:
        """A reference to the copy, if that is a module or a tensor of the model."""
        refers = type(value) is weakref.ref
        to = value() if refers else value.__repr__.__self__
        again = self._of_model(to)
        if again is to:
            return value
        return weakref.ref(again, value.__callback__) if refers else weakref.proxy(again)

    def _of_model(self, value: Any) -> Any:
        """The copy of a module or a tensor of the model; anything else itself."""
        return self.copy(value) if id(value) in self._modules or id(value) in self._replaced else value

    def _copy_weak_container(self, value: Any) -> Any:
        made = self._keep(value, type(value)())
        if isinstance(value, weakref.WeakSet):
            made.update(map(self._of_model, value))
        elif isinstance(value, weakref.WeakKeyDictionary):
            made.update((self._of_model(key), self.copy(item)) for key, item in value.items())
        else:
            made.update((self.copy(key), self._of_model(item)) for key, item in value.items())
        return made

    def _copy_object(self, value: Any) -> Any:
        """As :func:`copy.deepcopy` does it; `value` itself if it cannot be copied."""
        kind = type(value)
        try:
            if hasattr(kind, "__deepcopy__"):
                return value.__deepcopy__(self._made)
            if _has_attributes_alone(kind):  # a ``__getstate__`` may leave out what a copy needs
                return self._copy_attributes(value, self._keep(value, object.__new__(kind)))
            reducer = copyreg.dispatch_table.get(kind)
            reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
            return value if isinstance(reduced, str) else self._rebuild(value, *reduced)
        except Exception:  # whatever its class raises
            return value

    def _rebuild(
        self,
        value: Any,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        state: Any = None,
        items: Iterable[Any] | None = None,
        pairs: Iterable[tuple[Any, Any]] | None = None,
        set_state: Callable[[Any, Any], None] | None = None,
    ) -> Any:
        made = self._keep(value, make(*map(self.copy, args)))
        if state is not None:
            state = self.copy(state)
            if set_state is not None:
                set_state(made, state)
            elif hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
                if attributes:  # an object with slots alone has no __dict__
                    vars(made).update(attributes)
                for name, item in (slots or {}).items():
                    object.__setattr__(made, name, item)
        for item in items or ():
            made.append(self.copy(item))
        for key, item in pairs or ():
            made[self.copy(key)] = self.copy(item)
        return made

    # -- functions --

    def _copy_function(self, function: FunctionType) -> FunctionType:
        """A function whose closure is filled when all objects are copied. It leads to no further copies."""
        if not _may_refer(function, set()):
            return function
        cells = tuple(CellType() for _ in function.__closure__ or ())
        again = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        again.__qualname__ = function.__qualname__
        again.__doc__ = function.__doc__
        vars(again).update(vars(function))
        self._keep(function, again)
        self._functions.append((function, again))
        return again

    def _fill(self, function: FunctionType, again: FunctionType) -> None:
        if function.__defaults__ is not None:
            again.__defaults__ = tuple(map(self._counterpart, function.__defaults__))
        if function.__kwdefaults__ is not None:
            again.__kwdefaults__ = {name: self._counterpart(v) for name, v in function.__kwdefaults__.items()}
        for cell, new in zip(function.__closure__ or (), again.__closure__ or (), strict=True):
            for value in contents_of(cell):
                new.cell_contents = self._counterpart(value)

    def _counterpart(self, value: Any) -> Any:
        """The copy of `value`, if there is one; functions are made again."""
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, FunctionType):
            return self.copy(value)  # which is filled later in the same loop
        if isinstance(value, BuiltinFunctionType) and id(value.__self__) in self._made:
            return getattr(self._made[id(value.__self__)], value.__name__)
        if isinstance(value, MethodType) and id(value.__self__) in self._made:
            return MethodType(value.__func__, self._made[id(value.__self__)])
        if type(value) is partial:
            keywords = {name: self._counterpart(given) for name, given in value.keywords.items()}
            again = partial(self._counterpart(value.func), *map(self._counterpart, value.args), **keywords)
            vars(again).update(vars(value))
            return again
        # An object that only code refers to is shared, unless it holds the model's tensors.
        shared = isinstance(value, (*_SHARED, *WEAK_REFERENCES, torch.Tensor, nn.Module))
        return self.copy(value) if not shared and holds(value, self._replaced) else value


def _has_attributes_alone(kind: type) -> bool:
    """Whether an object of class `kind` is its ``__dict__``: no class of it has slots, or is written in C."""
    return all(
        base is object or (("__dict__" in vars(base) or "__weakref__" in vars(base) or base.__dictoffset__)
        and not vars(base).get("__slots__")
        and base.__reduce__ is object.__reduce__
        and base.__reduce_ex__ is object.__reduce_ex__
        and bool(base.__flags__ & _HEAP_TYPE))
        for base in kind.__mro__
    )  # fmt: skip


def _may_refer(value: Any, seen: set[int]) -> bool:
    """Whether a function's closure or defaults hold an object that may be copied."""
    if id(value) in seen or isinstance(value, _SHARED):
        return False
    seen.add(id(value))
    if not isinstance(value, FunctionType):
        return True
    contents = [inner for cell in value.__closure__ or () for inner in contents_of(cell)]
    contents += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return any(_may_refer(inner, seen) for inner in contents)
