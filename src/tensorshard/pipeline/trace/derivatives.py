"""Models whose own code computes derivatives through their units, which stages cannot: each has a part of the graph."""

import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tensorshard.torch_private.autograd import is_function_transformed

_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)

_REMEDY = (
    "the graph lies on several stages, of which none has all of it: set pp=1, or move this code into a module that "
    "holds all that it differentiates, and name that as one unit (pp_units)"
)


class UncuttableError(ValueError):
    """A model cannot be cut into stages for any inputs. The message says why.

    Args:
        cause: what the model does.
        rest: what stands in the way then, and what would work.
        whole: the module that has to be one unit, if that would do; "" if it is the model, or none would.
    """

    def __init__(self, cause: str, rest: str = "", whole: str = "") -> None:
        super().__init__(cause + rest)
        self.cause, self.whole = cause, whole


class WithoutDerivatives(TorchFunctionMode):
    """Refuses derivatives that the model's forward computes outside of units.

    Args:
        module: the name of the module whose code runs; None inside of a unit, which has the whole graph.
    """

    def __init__(self, module: Callable[[], str | None]) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DERIVATIVES:
            return func(*args, **(kwargs or {}))
        where = self._module()
        if where is None:
            return _within_a_unit(func, args, kwargs or {})
        raise UncuttableError(
            f"{f'module {where!r}' if where else 'the forward of the model'} computes a derivative "
            f"(torch.autograd.{func.__name__}), as for forces or a gradient penalty, through modules that a pipeline "
            f"may cut; {_REMEDY}"
        )


def _within_a_unit(func: Any, args: Any, kwargs: Any) -> Any:
    """The derivative, if all that it goes through is in the unit."""
    sentence = (
        f"a unit computes a derivative (torch.autograd.{func.__name__}) by a tensor from outside of it, which other "
        f"modules may have changed on the way; {_REMEDY}"
    )
    try:
        gradients = func(*args, **kwargs)
    except RuntimeError as error:
        if "not have been used in the graph" not in str(error):
            raise
        raise UncuttableError(sentence) from error
    if gradients is not None and any(each is None for each in gradients):
        raise UncuttableError(sentence)
    return gradients


def check_differentiable(unit: str, around: str) -> None:
    """Refuses a call of `unit` from code that computes its gradients itself.

    Args:
        around: the module whose code runs.

    Raises:
        UncuttableError: the caller runs inside of the forward of an autograd function, or of a torch.func transform.
    """
    if is_function_transformed():
        raise UncuttableError(
            f"the model calls {unit!r} inside of a function that torch.func transforms (grad, vjp, vmap)",
            f"; {_REMEDY}",
            around,
        )
    if torch.is_grad_enabled():  # the forward of an autograd function runs without gradients
        return
    forwards = dict(_forwards_of(torch.autograd.Function))
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in forwards:
            raise UncuttableError(
                f"the model calls {unit!r} inside of {forwards[frame.f_code]}.forward, an autograd function that "
                f"computes the gradients of its modules itself (as reversible networks do)",
                f", so {_REMEDY}",
                around,
            )
        frame = frame.f_back  # type: ignore[assignment]


def _forwards_of(function: type) -> Iterator[tuple[CodeType, str]]:
    """The code of the forward of every class derived from `function`, with the class's name."""
    derived: list[Any] = function.__subclasses__()
    for cls in derived:
        code = getattr(inspect.unwrap(cls.forward), "__code__", None)
        if code is not None and "forward" in vars(cls):
            yield code, cls.__name__
        yield from _forwards_of(cls)


class DetachedAlias(torch.autograd.Function):
    """The identity. Its result, unlike a view, may be detached and be changed in place, whatever it was made from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient
