"""Code that torch.compile leaves alone."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def never_compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`function`, made to run uncompiled under ``torch.compile`` too, between two graphs.

    As ``torch.compiler.disable``, but that imports the compiler at once. This waits until something is compiled.
    """
    disabled: list[Callable[_Arguments, _Result]] = []

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call
