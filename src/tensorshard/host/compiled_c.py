"""Compiles a few lines of C with this machine's own C compiler, for its own processor, in about a second.

It is for work that takes torch many passes over memory. Without a compiler, torch does that work.
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
_SECONDS = 60  # time limit of the compiler


def compile_c(source: str) -> ctypes.CDLL | None:
    """The functions of `source`; None if there is no compiler, or it fails."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tensorshard-") as folder:
        file, library = Path(folder, "functions.c"), Path(folder, "functions.so")
        try:
            file.write_text(source)
            command = [compiler, *_OPTIONS, str(file), "-o", str(library), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
            return ctypes.CDLL(str(library))  # it stays loaded when its file is removed
        except (OSError, subprocess.SubprocessError):
            return None


def in_threads(count: int, run: Callable[[int, int], None], *, multiple: int, least: int) -> None:
    """Calls run(start, end) for the parts of range(count), in as many threads as torch computes with.

    Args:
        multiple: parts end at multiples of it, except for the last.
        least: the smallest part that is worth a thread.
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
