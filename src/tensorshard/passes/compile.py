"""Compilation of a model's blocks (torch.compile), one by one, and what is not compiled.

Split layers are not compiled, since a compiled graph cannot contain their collectives. The code between them is
compiled in parts.
"""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from tensorshard.model.forwards import Role, convert_forward, replaces_forward, roles_of

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


_OF_TENSOR_PARALLELISM = frozenset(role for role in Role if Role.SPLIT_LAYER <= role <= Role.SEQUENCE_LENGTH)

# Code of these roles runs a mode that changes reshapes around all that is further in. That is not compiled.
_RESHAPING = frozenset([Role.LOCAL_SHAPES, Role.SEQUENCE_SHAPES])


def compile_blocks(blocks: list[nn.Module], recompute: str) -> list[str]:
    """Compiles each block's forward. Hooks stay outside of what is compiled, and so does tensor parallelism's code.

    Args:
        recompute: as in :class:`tensorshard.Plan`. It was applied before.

    Returns:
        What else is not compiled, and why: a sentence for each kind.
    """
    reshaping: Counter[str] = Counter()
    split = 0
    for block in blocks:
        for module in block.modules():
            if roles_of(module) & _OF_TENSOR_PARALLELISM:
                split += 1
                if not roles_of(module).isdisjoint(_RESHAPING):
                    reshaping[type(module).__name__] += 1
                _compile_further_in(module)
        if Role.UNCOMPILED not in roles_of(block):
            convert_forward(block, Role.COMPILATION, torch.compile)
    if split and recompute != "none":
        return [
            f"with tp, blocks under recompute={recompute!r} are not compiled: torch.compile does not look into them"
        ]
    return [
        f"{count} {name} are not compiled: their code reshapes to sizes that tp changes"
        for name, count in reshaping.items()
    ]


def _compile_further_in(module: nn.Module) -> None:
    composite = any(True for _ in module.children())
    if composite and not replaces_forward(module) and roles_of(module).isdisjoint(_RESHAPING):
        convert_forward(module, Role.INNER_COMPILATION, torch.compile)
    convert_forward(module, Role.UNCOMPILED, torch.compiler.disable)


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
