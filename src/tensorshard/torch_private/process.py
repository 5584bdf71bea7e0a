"""What torch keeps for this process: CUDA's record of its memory, the worker of a DataLoader, and messages.

A message is silenced only while tensorshard runs, and by its exact words. Messages that can be avoided at their source
are not here: a deprecated class of torch's own (:mod:`.pytree`), and a limit of recompilations that uncompiled layers
reached (:mod:`tensorshard.passes.compile`).
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as worker_module

_MOST_EVENTS = 200_000
_NO_CUDA = "No CUDA runtime is found, using CUDA_HOME='%s'"
_ABOVE_USDT = "6"


@contextmanager
def recorded_cuda_memory(device: torch.device, path: Path) -> Iterator[None]:
    """Inside, allocations on a CUDA `device` are recorded, and written to `path` at the end. Others do nothing.

    Why: a snapshot shows every segment and block, and the stack that allocated it, on https://pytorch.org/memory_viz.

    Checked: torch 2.13 and 2.15, by reading; these functions are documented, though their names begin with "_".

    Public way: none.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def become_only_reader() -> tuple[int, int]:
    """Lets the data set of this process take itself for the only reader; returns the worker's number, and of how many.

    Why: streams deal themselves over the workers, each in its own way. The order of the samples would then depend on
    the number of workers.

    Checked: torch 2.13.

    Public way: none.
    """
    info = get_worker_info()
    if info is None:
        return 0, 1
    worker_module._worker_info = None
    return info.id, info.num_workers


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
