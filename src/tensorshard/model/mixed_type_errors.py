"""Explains torch's errors about tensors of two types, in a forward of 16 bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from torch import nn

from tensorshard.model.forward_code import is_foreign
from tensorshard.model.reachable_state import users_class

_SIGNS = ("dtype", "scalar type", "same type", "Input type (", "data type")
_TYPES = ("BFloat16", "Half", "bfloat16", "float16")


class MixedTypesError(RuntimeError):
    """A module mixes 16-bit tensors with fp32 ones in an operation that takes one type."""


@contextmanager
def explained_types(precision: str) -> Iterator[None]:
    """A context for a forward.

    Args:
        precision: of the plan.

    Raises:
        MixedTypesError: in place of torch's error that tensors differ in type; names the module.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, MixedTypesError) or not _is_of_types(text):
            raise
        named = _module_of(error.__traceback__)
        if named is None:
            raise
        raise MixedTypesError(
            f"module {named} mixes 16-bit tensors with fp32 ones ({text.splitlines()[0]}): under "
            f"precision={precision!r} parameters and the results of products have 16 bits, and buffers, other tensors "
            f"and new ones stay fp32. Convert one of the operands in its forward, as in a.to(b.dtype)"
        ) from error


def _is_of_types(text: str) -> bool:
    return any(sign in text for sign in _SIGNS) and any(name in text for name in _TYPES)


def _module_of(traceback: TracebackType | None) -> str | None:
    """The innermost module of the user's whose code was running, by its name and class; None if there is none."""
    running: list[nn.Module] = []
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            running.append(owner)
        traceback = traceback.tb_next
    users = [module for module in running if not is_foreign(users_class(module).__module__)] or running
    if not users:
        return None
    names = {id(module): name for name, module in running[0].named_modules()}
    name, kind = names.get(id(users[-1])), users_class(users[-1]).__name__
    return f"{name!r} ({kind})" if name else kind
