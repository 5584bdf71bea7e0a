"""What does each operation: a rule, torch's own Python code of it, or whole tensors; and positions that a model counts.

``torch.arange(T)`` is cut where T is the length of a sequence. What the model makes of it, such as masks, biases and
rotations, then has this rank's rows only.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel import rules as _registered  # noqa: F401  # registers the rules
from tensorshard.context_parallel.context_group import active, replace_while_active
from tensorshard.context_parallel.layout_changes import cut_for, gathered, map_tensors, sequence_tensors
from tensorshard.context_parallel.rule_table import Rule, is_pointwise, name_of, rules, writes
from tensorshard.context_parallel.rules.pointwise import pointwise
from tensorshard.context_parallel.sequence_tensor import Handler, SequenceTensor, before_use
from tensorshard.torch_private.dispatch import python_body, without_torch_functions_of_tensors
from tensorshard.torch_private.tensors import QUESTIONS, object_attributes

_WRAPPER_ANSWERS = frozenset((
    "is_floating_point", "is_complex", "get_device", "element_size", "itemsize", "is_signed", "is_inference",
    "is_nested", "is_quantized", "is_sparse", "layout", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu",
    "is_xla", "names", "dtype", "device", *QUESTIONS,
))  # fmt: skip
_LOCAL_ANSWERS = frozenset(["is_contiguous", "retain_grad", "is_pinned", "is_shared", "data_ptr"])

_bodies_entered = threading.local()
_SMALLEST = 64
"""Results of fewer elements stay whole."""

_VALUES = frozenset((
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__",
    "__contains__", "is_nonzero", "equal", "allclose", "__format__",
))  # fmt: skip
"""Questions for values, which need a whole tensor by their nature."""


class Handlers(dict[Callable[..., Any], Handler]):
    """The handler of each function, found when it is first called."""

    def __missing__(self, func: Callable[..., Any]) -> Handler:
        handler = self[func] = find_handler(func)
        return handler


def find_handler(func: Callable[..., Any]) -> Handler:
    """What does `func` on sequence tensors."""
    name = name_of(func)
    if name in _WRAPPER_ANSWERS:
        return _ask_wrapper
    if func in object_attributes() or name in _LOCAL_ANSWERS:
        return _ask_local
    rule = rules.get(name) or (None if name.startswith("__") else rules.get(name.rstrip("_")))
    if rule is None and is_pointwise(name):
        rule = pointwise
    return _attempts(rule, python_body(func))


def _attempts(rule: Rule | None, body: Callable[..., Any] | None) -> Handler:
    """Tries a rule, then torch's own Python code, then whole tensors."""

    def handle(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        for arg in args:
            for each in arg if type(arg) in (list, tuple) else (arg,):
                if type(each) is SequenceTensor and (
                    each._gathered is not None or each._copied_from is not None or each.group.pieces
                ):
                    before_use(each, func)
        result = NotImplemented if rule is None else rule(func, args, kwargs)
        if result is NotImplemented and body is not None:
            result = _run_body(func, body, args, kwargs)
        return compute_whole(func, args, kwargs) if result is NotImplemented else result

    return handle


def _run_body(func: Callable[..., Any], body: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    entered: set[Any] = _bodies_entered.__dict__.setdefault("functions", set())
    if func in entered:
        return NotImplemented
    entered.add(func)
    try:
        return body(*args, **kwargs)
    finally:
        entered.discard(func)


def _ask_wrapper(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with without_torch_functions_of_tensors():
        return func(*args, **kwargs)


def _ask_local(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], SequenceTensor):
        return compute_whole(func, args, kwargs)
    return func(args[0].local, *args[1:], **kwargs)


def install() -> None:
    """Gives sequence tensors their operations, and cuts positions while a thread works for a group."""
    SequenceTensor.handlers = Handlers()
    replace_while_active(torch, "arange", _cutting)


def compute_whole(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], name: str | None = None
) -> Any:
    """``func(*args, **kwargs)`` on whole tensors, on every rank.

    Returns:
        What `func` returns; large tensors that have a dimension of the sequence's length are cut along it.
    """
    name = name or name_of(func)
    given = sequence_tensors((tuple(args), kwargs))
    if name not in _VALUES:
        given[0].group.note_fallback(name)
    out = kwargs.get("out")
    if isinstance(out, SequenceTensor):
        result = func(*_whole(tuple(args), name), **_whole({**kwargs, "out": None}, name))
        return out.copy_(result)
    if writes(name_of(func)) and isinstance(args[0], SequenceTensor):
        return _written(func, args, kwargs, name)
    result = func(*_whole(tuple(args), name), **_whole(kwargs, name))
    return result if writes(name) else cut_again(result, given)


def _whole(tree: Any, name: str) -> Any:
    return map_tensors(lambda tensor: gathered(tensor, name), tree)


def _written(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    target: SequenceTensor = args[0]
    copy = gathered(target, name).clone()
    func(copy, *_whole(tuple(args[1:]), name), **_whole(kwargs, name))
    if copy.shape != target.shape:
        raise NotImplementedError(
            f"{name} would change the shape of a tensor that is cut along its sequence in place; use the function that "
            "returns a new tensor"
        )
    target.local.copy_(cut_for(copy, target.split_dim, target.sequence, target.group).local)
    return target


def cut_again(tree: Any, given: Sequence[SequenceTensor]) -> Any:
    """`tree` with those whole tensors cut that have a dimension of one of the given sequences' lengths."""
    largest = max(tensor.numel() for tensor in given)
    of_share = any(tensor.sequence.origin for tensor in given)  # which no rank may hold whole

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, SequenceTensor):
            return tensor
        is_plain = not tensor.is_floating_point() and tensor.numel() <= largest
        if (is_plain or tensor.numel() < _SMALLEST) and not of_share:
            return tensor
        for like in given:
            for dim in (like.split_dim, like.split_dim - like.ndim + tensor.ndim, *range(tensor.ndim)):
                if 0 <= dim < tensor.ndim and tensor.shape[dim] == like.sequence.length:
                    return cut_for(tensor, dim, like.sequence, like.group)
        return tensor

    return map_tensors(one, tree)


def _cutting(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def arange(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(*args, **kwargs)
        activation = active()
        if activation is None or kwargs.get("out") is not None or kwargs.get("requires_grad"):
            return out
        layout = activation.layouts.get(len(out))
        return out if layout is None else cut_for(out, 0, layout, activation.group)

    return arange
