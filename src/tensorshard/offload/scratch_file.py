"""One rank's space on disk."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tensorshard.offload.folders import BLOCK, free_bytes, open_unnamed

_LOST = "Weights and optimizer states are lost; go on from the last checkpoint"


class ScratchFile:
    """A file without a name, for direct I/O and for tensors that are mapped to it. Its space is reserved in advance.

    Steps read and write it without the page cache, by :meth:`read` and :meth:`write`, from several threads at once.
    Between steps, checkpoints and the user get tensors that are mapped to it, by :meth:`tensor`. Before steps use it
    again, call :meth:`sync_mapping`.

    Args:
        folder: where it is.
        lost: what is lost if the disk fails, for messages.

    Raises:
        ValueError: the folder cannot hold it, see :func:`.folders.open_unnamed`.
    """

    def __init__(self, folder: Path, lost: str = _LOST) -> None:
        self.folder = folder
        self._lost = lost
        self.nbytes = 0
        self._maps: dict[int, mmap.mmap] = {}
        self._descriptor = open_unnamed(folder)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)  # mapped tensors keep their part of the file

    def reserve(self, nbytes: int, *, mapped: bool = True) -> int:
        """Makes the file larger by `nbytes`, in whole blocks; returns where they begin.

        Args:
            mapped: whether :meth:`tensor` will be called for them.

        Raises:
            ValueError: there is not so much space left.
        """
        start, size = self.nbytes, max(BLOCK, round_up(nbytes))
        try:
            os.posix_fallocate(self._descriptor, start, size)
        except OSError as error:
            raise ValueError(
                f"offload to {str(self.folder)!r} needs {start + size:,} bytes for this rank, and after the first "
                f"{start:,} of them the disk has {free_bytes(self.folder):,} left ({error.strerror}); set offload.path "
                f"to a folder on a larger disk, or shard over more processes"
            ) from error
        if mapped:
            self._maps[start] = mmap.mmap(self._descriptor, size, offset=start)
        self.nbytes = start + size
        return start

    def tensor(self, reserved: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements that lie `offset` bytes into what was reserved at `reserved`, as a tensor mapped to the file.

        They are zeros before the first write. Reads of the tensor go through the page cache, which the system takes
        back when it needs the memory.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._maps[reserved], dtype=dtype, count=numel, offset=offset)

    def read(self, into: memoryview, offset: int) -> None:
        """Fills `into`, whole blocks at an aligned address, from byte `offset`.

        Raises:
            OSError: the disk failed; names the folder.
        """
        self._transfer(os.preadv, into, offset, "read")

    def write(self, values: memoryview, offset: int) -> None:
        """Writes `values`, whole blocks at an aligned address, to byte `offset`.

        Raises:
            OSError: the disk failed; names the folder.
        """
        self._transfer(os.pwritev, values, offset, "written")

    def sync_mapping(self) -> None:
        """Writes the changes of mapped tensors to the disk, and drops the file from the page cache."""
        os.fdatasync(self._descriptor)  # this includes mapped pages
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _transfer(self, call: Callable[[int, list[Any], int], int], memory: memoryview, offset: int, done: str) -> None:
        total = 0
        try:
            while total < len(memory):
                count = call(self._descriptor, [memory[total:]], offset + total)
                if count == 0:
                    raise OSError(f"the file ends at byte {offset + total}")
                total += count
        except OSError as error:
            raise OSError(
                f"{len(memory):,} bytes of the scratch file in {str(self.folder)!r} could not be {done} at byte "
                f"{offset:,}: {error.strerror or error}. {self._lost}, with offload.path on another disk"
            ) from error


def round_up(nbytes: int) -> int:
    """`nbytes` in whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK
