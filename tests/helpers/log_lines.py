"""What the package logs, in the process of a test or of a rank."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(level: int | None = None) -> Iterator[list[str]]:
    """A list that collects the messages logged within it: those of `level` and above, or of the logger's own."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tensorshard")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(before if level is None else level)
    try:
        yield messages
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
