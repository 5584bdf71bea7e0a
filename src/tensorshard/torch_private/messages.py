"""Messages of torch that a user of tensorshard can do nothing about. They are silenced only while tensorshard runs.

Each is matched by its exact words. No other message is silenced. Messages that can be avoided at their source are not
here: a deprecated class of torch's own (``pytree.spec_as_tuples``), and a limit of recompilations that uncompiled
layers
reached (``transforms.compile``).
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

_NO_CUDA = "No CUDA runtime is found, using CUDA_HOME='%s'"
_ABOVE_USDT = "6"


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, torch does not warn that there is a CUDA toolkit and no GPU.

    Why: compilation for CPUs looks for the toolkit and works without it. The user has chosen to train on CPUs.

    Checked: torch 2.13 and 2.15, of which builds for CUDA say so.

    Public way: none; ``TORCH_LOGS`` sets the level of all messages.
    """

    def is_another(record: logging.LogRecord) -> bool:
        return record.msg != _NO_CUDA

    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addFilter(is_another)
    try:
        yield
    finally:
        logger.removeFilter(is_another)


def silence_profiler_marks() -> None:
    """Keeps "USDT: ... profiler_start" and "profiler_stop", which torch's profiler writes to stderr, off the terminal.

    Why: they are marks for tracing tools, and break the progress bar. The first profiler of a process reads the
    variable, once. A user's setting stays. Only for profiles of CPUs: errors of a GPU's profiler have a lower level.

    Checked: torch 2.13 and 2.15.

    Public way: this variable, which torch does not document.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _ABOVE_USDT)
