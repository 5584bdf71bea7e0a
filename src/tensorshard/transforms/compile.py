"""Compilation of a model's blocks (torch.compile), one by one, and what is left out of it."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from tensorshard.modules.forwards import Role, convert_forward

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def compile_blocks(blocks: list[nn.Module]) -> None:
    """Compiles each block's forward. Hooks stay outside of what is compiled."""
    for block in blocks:
        convert_forward(block, Role.COMPILATION, torch.compile)


def never_compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`function`, which runs as it is under ``torch.compile`` too, between two graphs.

    As ``torch.compiler.disable``, which imports the compiler at once: here that waits until something is compiled.
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
