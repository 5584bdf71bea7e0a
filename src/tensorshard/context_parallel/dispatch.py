"""What does each operation: a rule, torch's own Python code of it, or whole tensors."""

import functools
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from tensorshard.context_parallel import rules as _registered  # noqa: F401  # registers the rules
from tensorshard.context_parallel.fallback import compute_whole
from tensorshard.context_parallel.rule_table import Rule, is_pointwise, name_of, rules
from tensorshard.context_parallel.rules.pointwise import pointwise
from tensorshard.context_parallel.sequence_tensor import Handler, SequenceTensor
from tensorshard.context_parallel.views import before_use
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.tensors import QUESTIONS, object_attributes

_WRAPPER_ANSWERS = frozenset((
    "is_floating_point", "is_complex", "get_device", "element_size", "itemsize", "is_signed", "is_inference",
    "is_nested", "is_quantized", "is_sparse", "layout", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu",
    "is_xla", "names", "dtype", "device", *QUESTIONS,
))  # fmt: skip
_LOCAL_ANSWERS = frozenset(["is_contiguous", "retain_grad", "is_pinned", "is_shared", "data_ptr"])

_bodies_entered = threading.local()


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
    found = rules.get(name) or (None if name.startswith("__") else rules.get(name.rstrip("_")))
    if found is None and is_pointwise(name):
        found = pointwise
    return _attempts(found, python_body(func))


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


@functools.cache
def python_body(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """torch's own Python code of a function, for sequence tensors: the rules see what it calls."""
    if not isinstance(func, types.FunctionType) or func.__module__ not in ("torch.nn.functional", "torch.functional"):
        return None

    def no(*args: Any, **kwargs: Any) -> bool:
        return False

    names = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), no)
    body = types.FunctionType(
        func.__code__, {**func.__globals__, **names}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _ask_wrapper(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with without_torch_functions_of_tensors():
        return func(*args, **kwargs)


def _ask_local(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], SequenceTensor):
        return compute_whole(func, args, kwargs)
    return func(args[0].local, *args[1:], **kwargs)


def install() -> None:
    """Gives sequence tensors their operations."""
    SequenceTensor.handlers = Handlers()
