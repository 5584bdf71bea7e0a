"""Compilation of a model's blocks (torch.compile), one by one, and what is not compiled.

Split layers are not compiled, since a compiled graph cannot contain their collectives. The code between them is
compiled in parts.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tensorshard.model.forwards import TENSOR_PARALLEL_ROLES, Role, convert_forward, replaces_forward, roles_of
from tensorshard.torch_private import process
from tensorshard.torch_private.compilation import watch_compilation

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
            if roles_of(module) & TENSOR_PARALLEL_ROLES:
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


logger = logging.getLogger("tensorshard")


class CompileLog:
    """Explains a silent minute: logs that torch.compile begins inside of :meth:`watched`, and the seconds at its end.

    Args:
        clock: returns the seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._depth = 0
        self._began = 0.0
        self._seconds: float | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """May be nested. The outermost one reports."""
        self._depth += 1
        stop = watch_compilation(self._begun, self._ended) if self._depth == 1 else None
        try:
            with process.compiling():
                yield
        finally:
            self._depth -= 1
            if stop is not None:
                stop()
                self._report()

    def _begun(self) -> None:
        self._began = self._clock()
        if self._seconds is None:
            logger.info("torch.compile is compiling the model's blocks, which may take minutes")
            self._seconds = 0.0

    def _ended(self) -> None:
        self._seconds = (self._seconds or 0.0) + self._clock() - self._began

    def _report(self) -> None:
        if self._seconds is not None:
            logger.info("torch.compile took %.1f s", self._seconds)
            self._seconds = None
