"""What torch says that a user of tensorshard cannot act on: silenced one by one, and only while tensorshard causes it.

Each is named by its exact words. Nothing else is silenced, of torch's or of anybody's. What can be avoided at its
source is not here: a deprecated class of torch's own (``pytree.spec_as_tuples``), and a limit of recompilations that
layers met which are not compiled (``transforms.compile``).
"""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_ONE_PROCESS = (
    "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to load in a single process."
)
_NO_CUDA = "No CUDA runtime is found, using CUDA_HOME='%s'"
_ABOVE_USDT = "6"


@contextmanager
def reading_in_one_process() -> Iterator[None]:
    """Within it ``torch.distributed.checkpoint.load`` does not warn that it reads in a single process.

    Why: that is what was asked for, by ``no_dist=True``; the warning comes for every tensor.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf"{re.escape(_ONE_PROCESS)}\Z", category=UserWarning)
        yield


@contextmanager
def compiling() -> Iterator[None]:
    """Within it torch does not warn that there is a CUDA toolkit and no GPU.

    Why: compilation for CPUs asks where the toolkit is and does without it; training on CPUs is what was asked for.

    Checked: torch 2.11 and 2.13, of which builds for CUDA say so.

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

    Why: they are marks for tracing tools, and tear the progress bar. The variable is read once, by the first profiler
    of a process; what the user has set stays. Only for profiles of CPUs: errors of a GPU's profiler have a lower level.

    Checked: torch 2.11 and 2.13; 2.13 writes them.

    Public way: this variable, which torch does not document.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _ABOVE_USDT)
