"""A few lines of C, compiled in a second by this machine's own C compiler, for its own processor.

For what takes torch many passes over memory. Where there is no compiler, torch does it.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

_OPTIONS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_SECONDS = 60  # that compiling may take


def compile_c(source: str) -> ctypes.CDLL | None:
    """The functions of `source`; None where there is no compiler, or it refuses."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tensorshard-") as folder:
        file, library = Path(folder, "functions.c"), Path(folder, "functions.so")
        try:
            file.write_text(source)
            command = [compiler, *_OPTIONS, str(file), "-o", str(library), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
            return ctypes.CDLL(str(library))  # stays when its file is gone
        except (OSError, subprocess.SubprocessError):
            return None


def in_threads(count: int, run: Callable[[int, int], None], *, multiple: int, least: int) -> None:
    """Calls run(start, end) for the parts of range(count), in as many threads as torch computes with.

    Args:
        multiple: where parts end, but for the last. least: what is worth a thread.
    """
    threads = min(torch.get_num_threads(), count // least)
    if threads < 2:
        run(0, count)
        return
    each = -(-count // threads // multiple) * multiple
    others = [_pool().submit(run, start, min(start + each, count)) for start in range(each, count, each)]
    run(0, each)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="tensorshard-c")
