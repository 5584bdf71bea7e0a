"""Statistics and softmaxes that code takes, and the dimensions that it takes them over."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tensorshard.model.provenance import run_operation


def _functions(place: int, *names: str) -> dict[Callable[..., Any], int]:
    """torch's functions and methods of these names, each with the place of the dimensions among its arguments."""
    functions = (getattr(owner, name, None) for name in names for owner in (torch, torch.Tensor, torch.linalg))
    return {function: place for function in functions if function is not None}


STATISTICS = {
    **_functions(1, "max", "min", "amax", "amin", "aminmax", "mean", "std", "var"),
    **_functions(2, "norm", "vector_norm"),
}
"""What makes a few values of many, each of which depends on all of them."""

SOFTMAXES = _functions(1, "softmax", "log_softmax") | dict.fromkeys((F.softmax, F.log_softmax), 1)
"""What weighs elements along a dimension by comparing them."""


class NotedStatistics(TorchFunctionMode):
    """Calls :meth:`note` for each of some functions that the code inside of this context calls.

    Args:
        functions: such as :data:`STATISTICS`, each with the place of its dimensions among the arguments.
    """

    def __init__(self, functions: Mapping[Callable[..., Any], int] = STATISTICS) -> None:
        super().__init__()
        self._functions = functions

    def note(self, function: Callable[..., Any], tensor: torch.Tensor, dims: tuple[int, ...] | None) -> None:
        """Called before `function` reduces `tensor` over `dims`, each from 0 on; None: over all dimensions."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = self._functions.get(func)
        if place is not None and args and isinstance(args[0], torch.Tensor):
            dims = _dims(args[0], place, args, kwargs)
            if dims is None or dims:
                self.note(func, args[0], dims)
        return run_operation(func, args, kwargs)


def _dims(tensor: torch.Tensor, place: int, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """The dimensions that a call names; none where it names something else, such as a tensor to compare with."""
    given = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("axis"))
    if given is None or isinstance(given, bool):
        return None
    named = given if isinstance(given, tuple | list) else [given]
    if not all(isinstance(dim, int) for dim in named):
        return ()
    return tuple(dim % max(tensor.dim(), 1) for dim in named) or None
