"""Tensors whose uses pass other code: *watched* parameters, and views whose changes are stored elsewhere.

A watched parameter stays the same object, with the same memory. Only its class changes while it is watched, to a
subclass with ``__torch_function__``, which torch calls for every function and attribute of the tensor, whoever uses it.
An unwatched parameter costs nothing.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tensorshard.torch_private.dispatch import NOT_CALLED, without_torch_functions_of_tensors
from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.pytree import tree_leaves, tree_map_only
from tensorshard.torch_private.tensors import set_class, share_storage, tensor_version

_WATCHES = "_tensorshard_watches"  # a key in a parameter's __dict__
_TAKEN = "_tensorshard_data_taken"
_HOOKS, _HOOKS_AFTER = "_tensorshard_gradient_hooks", "_tensorshard_hooks_after"
_NAME = "_tensorshard_name"
_PAUSED = "_tensorshard_watches_paused"  # how many of them are away


_TENSOR: Any = torch.Tensor
_HELD, _HOLD = _TENSOR.grad.__get__, _TENSOR.grad.__set__

METADATA = frozenset(
    getter
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_meta")
    for getter in (getattr(_TENSOR, name).__get__, getattr(_TENSOR, name).__set__)
) | {
    _TENSOR.size,
    _TENSOR.dim,
    _TENSOR.numel,
    _TENSOR.stride,
    _TENSOR.element_size,
    _TENSOR.is_floating_point,
    _TENSOR.is_complex,
    _TENSOR.is_contiguous,
    _TENSOR.requires_grad_,
    _TENSOR.register_hook,
    _TENSOR.register_post_accumulate_grad_hook,
    _TENSOR.__hash__,
    _TENSOR.is_complex,
    _TENSOR.new_zeros,
    _TENSOR.new_ones,
    _TENSOR.new_empty,
    _TENSOR.new_full,
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
}
"""Functions that do not look at the values of a tensor, as ``__torch_function__`` gets them."""

_PLAIN_FUNCTION = nn.Parameter.__torch_function__

_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Watch:
    """What happens when code uses a watched parameter. This one does nothing."""

    def before_call(self, function: Callable[..., Any], watches: Collection["Watch"]) -> None:
        """Called before `function` gets parameters with these `watches`, of which this is one."""

    def before_use(self, parameter: nn.Parameter, function: Callable[..., Any]) -> None:
        """Called before `function` gets `parameter`. For attributes it is the getter, as in ``torch.Tensor.shape``."""

    def gradient(self, parameter: nn.Parameter, held: torch.Tensor | None) -> torch.Tensor | None:
        """What ``parameter.grad`` shows, where the tensor itself holds `held`."""
        return held

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> bool:
        """Called for ``parameter.grad = gradient``. Returns whether that is done; else the tensor will hold it."""
        return False

    stays_in_copies = False
    """Whether a deep copy of a parameter is watched, too."""

    is_outermost = False
    """Whether this watch gets what the others show, whenever they are added, as one that gathers what a rank holds."""

    def held_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What the tensor itself holds after ``parameter.grad = gradient``."""
        return gradient

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of ``function(*args, **kwargs)``, in which a watched parameter is; NotImplemented to leave it to
        the next watch further in, and then to torch. Called after every :meth:`before_use`."""
        return NotImplemented


class NotedParameter(nn.Parameter):
    """A parameter that notes when code takes its memory by ``parameter.data``, since no version counts writes to that.

    It behaves as an ``nn.Parameter``, at the same speed.
    """

    __torch_function__ = NOT_CALLED  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        data: torch.Tensor = _TENSOR.data.__get__(self)
        self.__dict__[_TAKEN] = True  # not before: a watch may publish the parameter meanwhile
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with without_torch_functions_of_tensors():
            if value.dtype != self.dtype or value.device != self.device:
                raise RuntimeError(
                    f"the parameter {self.__dict__.get(_NAME, '')!r} was given other memory (p.data = ..., "
                    f"model.half(), model.to(...)) of {value.dtype} on {value.device}, and the plan laid it out as "
                    f"{self.dtype} on {self.device}: set the type in Plan(precision=...) and the device in "
                    f"parallelize(device=...), or copy values into it with p.copy_(values) under torch.no_grad()"
                )
        _TENSOR.data.__set__(self, value)
        self.__dict__[_TAKEN] = True

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """The `hook` gets the gradient of the whole batch, once it is complete, and may return another."""
        return self._register(_HOOKS, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """The `hook` gets the parameter, whose ``grad`` is that of the whole batch."""
        return self._register(_HOOKS_AFTER, hook)

    def _register(self, key: str, hook: Callable[..., Any]) -> RemovableHandle:
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        hooks = self.__dict__.setdefault(key, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In files it is an ``nn.Parameter`` with the values at this time."""
        values = self.detach()
        plain = nn.Parameter(values if type(values) is torch.Tensor else values.clone(), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


NotedParameter.__name__ = NotedParameter.__qualname__ = "Parameter"


def note_data(parameter: nn.Parameter, name: str) -> None:
    """Makes the `parameter` with this `name` note when its ``data`` are taken."""
    if type(parameter) is nn.Parameter:
        set_class(parameter, NotedParameter)
        parameter.__dict__[_NAME] = name


def have_gradient_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether one of `parameters` may have hooks of the user's."""
    return any(_HOOKS in p.__dict__ or _HOOKS_AFTER in p.__dict__ for p in parameters)


def gradient_hooks(parameter: nn.Parameter) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks of the user's that get its gradient, and those that get it with its gradient."""
    own = parameter.__dict__
    return list(own.get(_HOOKS, {}).values()), list(own.get(_HOOKS_AFTER, {}).values())


def note_taken(parameter: nn.Parameter) -> None:
    """Notes that code has taken ``parameter.data``."""
    parameter.__dict__[_TAKEN] = True


def are_data_taken(parameters: Iterable[nn.Parameter]) -> list[bool]:
    """For each, whether code has taken ``parameter.data`` since :func:`forget_taken`."""
    return [_TAKEN in parameter.__dict__ for parameter in parameters]


def forget_taken(parameters: Iterable[nn.Parameter]) -> None:
    """Makes :func:`are_data_taken` false for each."""
    for parameter in parameters:
        parameter.__dict__.pop(_TAKEN, None)


class _Watched:
    """The part of a watched parameter's class that stands before its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_functions_of_tensors():
            parameters = list(_watched((args, kwargs.values())))
            watches = dict.fromkeys(watching for parameter in parameters for watching in watches_of(parameter))
            for watching in watches:
                watching.before_call(func, watches)
            for parameter in parameters:
                for watching in watches_of(parameter):
                    watching.before_use(parameter, func)
        for watching in reversed(watches):  # the outermost first
            result = watching.call(func, args, kwargs)
            if result is not NotImplemented:
                return result
        plain = cls.__mro__[2]  # the parameter's own class
        if plain.__torch_function__ is not _PLAIN_FUNCTION:  # type: ignore[attr-defined]
            return plain.__torch_function__(func, types, args, kwargs)  # type: ignore[attr-defined]
        with without_torch_functions_of_tensors():
            return func(*args, **kwargs)

    @property
    def grad(self) -> torch.Tensor | None:
        with without_torch_functions_of_tensors():
            shown: torch.Tensor | None = _HELD(self)
            for watching in watches_of(self):
                shown = watching.gradient(self, shown)  # type: ignore[arg-type]
            return shown

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        with without_torch_functions_of_tensors():
            for watching in reversed(watches_of(self)):
                gradient = watching.held_gradient(self, gradient)  # type: ignore[arg-type]
            for watching in watches_of(self):
                if watching.set_gradient(self, gradient):  # type: ignore[arg-type]
                    return
            _HOLD(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with the values at this time, which only those watches watch that stay in copies."""
        plain = type(self).__mro__[2]  # before a watch removes itself
        for watching in watches_of(self):
            watching.before_use(self, torch.clone)  # type: ignore[arg-type]
        with without_torch_functions_of_tensors():
            copied = plain.__deepcopy__(self, memo)  # type: ignore[attr-defined]
        set_class(copied, plain)
        copied.__dict__.pop(_WATCHES, None)
        copied.__dict__.pop(_PAUSED, None)
        for watching in watches_of(self):
            if watching.stays_in_copies:
                watch(copied, watching)
        return copied


def held_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient that autograd has added up in `parameter`, whatever ``parameter.grad`` shows."""
    with without_torch_functions_of_tensors():
        return _HELD(parameter)


def hold_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Makes `parameter` hold `gradient`, to which autograd adds, whatever ``parameter.grad`` shows."""
    with without_torch_functions_of_tensors():
        _HOLD(parameter, gradient)


def held_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor | None]:
    """:func:`held_gradient` of each."""
    with without_torch_functions_of_tensors():
        return list(map(_HELD, parameters))


def take_held_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """:func:`held_gradient` of each, which then holds none."""
    with without_torch_functions_of_tensors():
        gradients = list(map(_HELD, parameters))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                _HOLD(parameter, None)
    return gradients


@cache
def _watched_class(plain: type) -> type:
    return type(plain.__name__, (_Watched, plain), {"__module__": plain.__module__})


def watches_of(parameter: Any) -> list[Watch]:
    """The watches of `parameter`, oldest first, and then the outermost ones."""
    return list(parameter.__dict__.get(_WATCHES, ()))


def watch(parameter: nn.Parameter, watching: Watch) -> None:
    """Adds a watch; one that is there already is not added again."""
    watches: list[Watch] = parameter.__dict__.setdefault(_WATCHES, [])
    if watching not in watches:
        inner = sum(not other.is_outermost for other in watches)
        watches.insert(len(watches) if watching.is_outermost else inner, watching)
        if not isinstance(parameter, _Watched):
            set_class(parameter, _watched_class(type(parameter)))


def unwatch(parameter: nn.Parameter, watching: Watch) -> None:
    """Removes a watch, if it is there."""
    watches: list[Watch] | None = parameter.__dict__.get(_WATCHES)
    if watches is None or watching not in watches:
        return
    watches.remove(watching)
    if len(watches) > parameter.__dict__.get(_PAUSED, 0):
        return
    if not watches:
        del parameter.__dict__[_WATCHES]
    if isinstance(parameter, _Watched):
        set_class(parameter, type(parameter).__mro__[2])


class Pause:
    """Parameters of which one watch is away for a while, at the cost of an assignment each.

    Where all watches are away, they are of their plain class.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [(p, type(p).__mro__[2], type(p), p.__dict__) for p in parameters if isinstance(p, _Watched)]

    def begin(self) -> None:
        """From now on, the watch is away."""
        for parameter, plain, _, attributes in self._parameters:
            paused = attributes[_PAUSED] = attributes.get(_PAUSED, 0) + 1
            if len(attributes[_WATCHES]) <= paused:
                set_class(parameter, plain)

    def end(self) -> None:
        """The watch is back."""
        for parameter, _, watched, attributes in self._parameters:
            attributes[_PAUSED] -= 1
            set_class(parameter, watched)


class InUsersCode(ABC):
    """How tensors look to the user's code, where tensorshard's own gets them plain."""

    def __init__(self) -> None:
        self._depth = 0

    @abstractmethod
    def switch(self, users_code: bool) -> None:
        """Called when the user's code begins to run, and when it ends."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which all code gets them plain."""
        self._depth += 1
        if self._depth == 1:
            self.switch(False)
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.switch(True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A context, within :meth:`paused`, for the user's code."""
        depth, self._depth = self._depth, 0
        if depth:
            self.switch(True)
        try:
            yield
        finally:
            self._depth = depth
            if depth:
                self.switch(False)


def _watched(values: Iterable[Any]) -> Iterator[Any]:
    """The watched parameters in `values`, at any depth of tuples, lists and dicts."""
    for value in values:
        if isinstance(value, _Watched):
            yield value
        elif isinstance(value, tuple | list | type({}.values())):
            yield from _watched(value)
        elif isinstance(value, dict):
            yield from _watched(value.values())


class Source:
    """Values that are held in another form, and one tensor of them.

    Args:
        base: the tensor.
        version: counts the changes of them where they are held.
        read: makes a tensor such as `base` from it.
        write: stores such a tensor in it.
    """

    def __init__(
        self,
        base: torch.Tensor,
        version: Callable[[], int],
        read: Callable[[], torch.Tensor],
        write: Callable[[torch.Tensor], None],
    ) -> None:
        self.base = base
        self._version, self._read, self._write = version, read, write
        self._graph = base.grad_fn
        self._note()

    def _note(self) -> None:
        self._versions = tensor_version(self.base), self._version()

    @torch.no_grad()
    def refresh(self) -> None:
        """Reads the values again if they were changed where they are held."""
        if self._version() != self._versions[1] and not self.base.requires_grad:
            self.base.copy_(self._read())
            self._note()

    @torch.no_grad()
    def store(self) -> None:
        """Stores the values if the tensor was changed.

        Raises:
            RuntimeError: autograd records the change. torch refuses it, too, for leaves.
        """
        if tensor_version(self.base) == self._versions[0]:
            return
        if self.base.grad_fn is not self._graph:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation: write to parameters under "
                "torch.no_grad()"
            )
        self._write(self.base)
        self._note()

    def shown(self, result: Any) -> Any:
        """`result`, with those tensors in it that share memory with the base as :class:`WrittenThrough`."""
        if isinstance(result, torch.Tensor):
            return WrittenThrough.of(result, self) if self._shares_memory(result) else result
        if type(result) in (tuple, list):
            return type(result)(map(self.shown, result))
        return result

    def _shares_memory(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return False
        return share_storage(tensor, self.base)


class WrittenThrough(torch.Tensor):
    """A view of a :class:`Source`'s tensor. Changes in place reach the place where the values are held."""

    _plain: torch.Tensor
    _source: Source

    @classmethod
    def of(cls, plain: torch.Tensor, source: Source) -> torch.Tensor:
        """`plain`, a view of the tensor of `source`. A fake tensor stays itself: it has no values to write."""
        if isinstance(plain, FakeTensor):
            return plain
        shown = plain.as_subclass(cls)
        shown._plain, shown._source = plain, source
        return shown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = {id(leaf._source): leaf._source for leaf in _shown((args, kwargs))}
        for source in sources.values():
            source.refresh()
        given, options = tree_map_only(WrittenThrough, lambda leaf: leaf._plain, (tuple(args), kwargs))
        return run(func, given, options, sources.values(), {id(leaf._plain): leaf for leaf in _shown((args, kwargs))})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def run(
    function: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
    sources: Iterable[Source],
    same: Mapping[int, torch.Tensor],
) -> Any:
    """``function(*args, **kwargs)`` on the tensors of `sources`. What it changes is stored.

    Args:
        same: what to return in place of an argument, by the argument's ``id``.
    """
    # `.data` would have a version of its own.
    result = (torch.Tensor.detach if function == _DATA else function)(*args, **kwargs)
    for source in sources:
        source.store()
    if id(result) in same:
        return same[id(result)]
    for source in sources:
        result = source.shown(result)
    return result


def _shown(tree: Any) -> list[WrittenThrough]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, WrittenThrough)]
