"""Logs that blocks are being compiled, and how long it took, to explain a silent minute."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensorshard.torch_private import messages
from tensorshard.torch_private.compilation import watch_compilation

logger = logging.getLogger("tensorshard")


class CompileLog:
    """Logs a line when torch.compile begins to compile inside of :meth:`watched`, and one with the seconds at the end.

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
            with messages.compiling():
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
