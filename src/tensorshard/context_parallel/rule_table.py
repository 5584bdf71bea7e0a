"""The table of rules, and what is known of an operation by its name."""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

Rule = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]
"""Does an operation on sequence tensors: ``rule(func, args, kwargs)``. It returns NotImplemented if it does not know
this kind of call. It decides by shapes and layouts alone, never by this rank's values or its number of positions, so
that all ranks make the same exchanges."""

rules: dict[str, Rule] = {}
"""By the name of the operation, without the underscore of one in place."""

_BINARY = ["add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
_OPERATORS = {f"__{prefix}{name}__" for prefix in ("", "r", "i") for name in _BINARY} | {
    f"__{name}__" for name in ["neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"]
}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the rule for the operations with these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            rules[name] = function
        return function

    return register


@lru_cache(None)
def name_of(func: Any) -> str:
    """The name of an operation: of a function, a method, or the attribute that is read."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name) + ("=" if name == "__set__" else "")
    return str(name)


@lru_cache(None)
def writes(name: str) -> bool:
    """Whether the operation writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name in _OPERATORS and name.startswith("__i") and name != "__invert__")
    return name.endswith("_") and name != "requires_grad_"


@lru_cache(None)
def is_pointwise(name: str) -> bool:
    """Whether torch's operator of this name computes element by element."""
    if name.startswith("__"):
        return name in _OPERATORS
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


class Signature:
    """The arguments of an operation, for rules that have to know all of them.

    Args:
        like: a function with the same arguments.
    """

    def __init__(self, like: Callable[..., Any]) -> None:
        self._signature = inspect.signature(like)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """All arguments by name, with defaults; None if this is another kind of call."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        return bound.arguments
