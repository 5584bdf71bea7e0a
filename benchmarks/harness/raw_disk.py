"""Measures the disk's own speed: direct I/O of large blocks, several at a time, reading and writing at once."""

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tensorshard.offload.scratch_file import open_unnamed

_BLOCK = 16 << 20
_REQUESTS = 8


def raw_bytes_per_second(folder: Path, nbytes: int) -> float:
    """Bytes per second while reading `nbytes` of an unnamed file in `folder` and writing as many to another."""
    blocks = max(1, nbytes // _BLOCK)
    files = [open_unnamed(folder) for _ in range(2)]
    buffers = [mmap.mmap(-1, _BLOCK) for _ in range(_REQUESTS)]
    try:
        with ThreadPoolExecutor(_REQUESTS) as pool:

            def write(file: int, block: int) -> None:
                os.pwritev(file, [buffers[block % _REQUESTS]], block * _BLOCK)

            def read(file: int, block: int) -> None:
                os.preadv(file, [buffers[block % _REQUESTS]], block * _BLOCK)

            for file in files:  # unwritten space is slower to write, and is read as zeros without the disk
                list(pool.map(lambda block, file=file: write(file, block), range(blocks)))
            began = time.perf_counter()
            under_way = [
                pool.submit(call, file, block)
                for block in range(blocks)
                for call, file in ((read, files[0]), (write, files[1]))
            ]
            for request in under_way:
                request.result()
            return 2 * blocks * _BLOCK / (time.perf_counter() - began)
    finally:
        for file in files:
            os.close(file)
