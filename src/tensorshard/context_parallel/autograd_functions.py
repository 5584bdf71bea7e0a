"""Custom autograd functions, which would lose the gradients of tensors that they do not know.

They are given whole tensors, and their results are cut again. Those of FSDP, which return their arguments, act on this
rank's parts; recomputation repeats a forward with sequence tensors.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch

from tensorshard.context_parallel.context_group import (
    Activation,
    activated,
    active,
    prepare_before_active,
    replace_while_active,
)
from tensorshard.context_parallel.dispatch import compute_whole
from tensorshard.context_parallel.layouts import shares
from tensorshard.context_parallel.sequence_tensor import SequenceTensor
from tensorshard.layers.split_linear import SequenceSharded
from tensorshard.model.reachable_state import is_foreign
from tensorshard.torch_private.recomputation import (
    IDENTITIES,
    PLAIN_MARKERS,
    function_calls,
    is_reentrant_checkpoint,
    repeated_forwards,
)

_apply = function_calls.apply

ACTS_LOCALLY = "acts_on_parts"
"""An autograd function with this class attribute acts on this rank's part of each argument. The positions of what it
returns are those of the first argument that has some. The attribute may be a function that decides by the arguments, of
which the first has to be a part."""


def _guard(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``cls.apply(*args, **kwargs)``, perhaps of sequence tensors."""
    if not any(isinstance(arg, SequenceTensor) for arg in args) or cls.__name__ in PLAIN_MARKERS:
        return _apply(cls, *args, **kwargs)
    if is_reentrant_checkpoint(cls):
        return _checkpoint(cls, *args)
    if cls.__name__ in IDENTITIES:
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        return _as_sequences(given, _apply(cls, *map(_part, args)), strict=False)
    shared = _apply_to_shares(cls, args)
    if shared is not None:
        return shared
    if _acts_locally(cls, args):
        first = next(arg for arg in args if isinstance(arg, SequenceTensor))
        out = _apply(cls, *map(_part, args))
        return tuple(map(first.like, out)) if isinstance(out, tuple) else first.like(out)
    return compute_whole(lambda *whole: _apply(cls, *whole), args, kwargs, cls.__name__)


def _apply_to_shares(cls: Any, args: tuple[Any, ...]) -> Any:
    """What a function returns that cuts this rank's positions over tensor-parallel ranks, or joins their parts.

    Sequence parallelism calls such functions with the sizes of a whole sequence's shards. They get those of this rank's
    positions. None if this is no such function.
    """
    joins, x = getattr(cls, "joins_positions", None), args[0]
    if joins is None or not isinstance(x, SequenceTensor):
        return None
    place = next((index for index, arg in enumerate(args) if isinstance(arg, SequenceSharded)), None)
    if place is None and not isinstance(args[1], int):  # a layer whose inputs and outputs have all positions
        return None
    sharding = SequenceSharded(*args[1:4]) if place is None else args[place]
    layout = x.sequence.origin if joins else x.sequence
    if layout is None or x.split_dim != sharding.dim % x.ndim or sum(sharding.sizes) != layout.length:
        return None
    sizes, layouts = shares(layout, sharding.group.size())
    own = replace(sharding, sizes=sizes[x.group.rank])
    given = [x.local, *map(_part, args[1:])]
    if place is None:
        given[2] = own.sizes
    else:
        given[place] = own
    out = _apply(cls, *given)
    result = layout if joins else layouts[sharding.group.rank()]

    def laid_out(part: torch.Tensor) -> SequenceTensor:
        return SequenceTensor(part, x.split_dim, result, x.group)

    return tuple(map(laid_out, out)) if isinstance(out, tuple) else laid_out(out)


def _acts_locally(cls: Any, args: tuple[Any, ...]) -> bool:
    acts = getattr(cls, ACTS_LOCALLY, False)
    if not callable(acts):
        return bool(acts)
    return isinstance(args[0], SequenceTensor) and bool(acts(*args))


def _as_sequences(likes: Sequence[Any], parts: Sequence[Any], *, strict: bool = True) -> tuple[Any, ...]:
    """Sequence tensors of `parts` where `likes` are some, in their layouts."""
    pairs = zip(likes, parts, strict=strict)
    return tuple(like.like(part) if isinstance(like, SequenceTensor) else part for like, part in pairs)


def _part(value: Any) -> Any:
    return value.local if isinstance(value, SequenceTensor) else value


def _checkpoint(cls: Any, function: Callable[..., Any], keeps_random_state: bool, *args: Any) -> Any:
    """Autograd keeps this rank's parts; the function gets sequence tensors of them, in forward and in backward."""
    kept = active()
    given = next(arg for arg in args if isinstance(arg, SequenceTensor))
    activation = kept or Activation(given.group)
    likes: list[Any] = []

    def on_parts(*parts: Any) -> Any:
        with activated(activation):
            out = function(*_as_sequences(args, parts))
        outs = out if isinstance(out, tuple) else (out,)
        likes[:] = [out, *outs]
        locals_ = tuple(map(_part, outs))
        return locals_ if isinstance(out, tuple) else locals_[0]

    result = _apply(cls, on_parts, keeps_random_state, *map(_part, args))
    first, *layouts = likes
    results = result if isinstance(result, tuple) else (result,)
    wrapped = _as_sequences(layouts, results)
    likes.clear()
    return wrapped if isinstance(first, tuple) else wrapped[0]


def _repeating(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a checkpoint repeats in backward works for the same group there."""

    @functools.wraps(original)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        activation = active()
        if activation is None:
            return original(function, *args, **kwargs)

        def repeat(*again: Any, **again_by_name: Any) -> Any:
            with activated(activation):
                return function(*again, **again_by_name)

        return original(repeat, *args, **kwargs)

    return generator


def _refuse_unseen_calls() -> None:
    """Makes forwards of the user's autograd functions refuse sequence tensors, where calls of them may not be seen."""
    waiting = list(torch.autograd.Function.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        forward = vars(cls).get("forward")
        if cls in _refusing or is_foreign(cls.__module__) or not isinstance(forward, staticmethod):
            continue
        _refusing.add(cls)
        checked = staticmethod(_refusing_sequences(cls.__name__, forward.__func__))
        setattr(cls, "forward", checked)  # noqa: B010


def _refusing_sequences(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, SequenceTensor) for arg in args):
            raise RuntimeError(
                f"the autograd function {name} was called through an `apply` that was taken from it before, as by "
                f"`f = {name}.apply`, with a sequence of which each rank has a part; torch {torch.__version__} gives "
                f"cp no way to see such calls: call {name}.apply(...) itself, or set cp=1"
            )
        return forward(*args, **kwargs)

    return checked


_refusing: WeakSet[Any] = WeakSet()


def register() -> None:
    """Guards autograd functions while a thread works for a group."""
    function_calls.guard = _guard
    if not function_calls.sees_bound:
        prepare_before_active(_refuse_unseen_calls)
    replace_while_active(*function_calls.place, lambda original: function_calls.guarded)
    replace_while_active(*repeated_forwards(), _repeating)
