"""What the package logs, in the process of a test or of a rank."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[list[str]]:
    """A list that collects the messages logged within it."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tensorshard")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
