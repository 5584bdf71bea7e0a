"""One rank's space on disk: a file for direct I/O, in a folder that is checked before anything is allocated."""

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BLOCK = 4096
"""Direct I/O needs file offsets, lengths and addresses in multiples of this."""

# File systems in memory: files in them take the memory that offload should free.
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_REMEDY = "set offload.path to a folder on a local disk"
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
        ValueError: the folder cannot hold it, see :func:`open_unnamed`.
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


def open_unnamed(folder: Path) -> int:
    """The descriptor of a new file in `folder`, for direct I/O. It has no name, so it is gone with its last user.

    Raises:
        ValueError: the folder does not exist, is in memory, cannot be written, or has no direct I/O.
    """
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise ValueError(f"offload.path {str(folder)!r} {what}; {_REMEDY}")
    kind = file_system(folder)
    if kind in _IN_MEMORY:
        raise ValueError(
            f"offload.path {str(folder)!r} is on {kind}, which is memory, so nothing would be saved; {_REMEDY}, or set "
            f"offload.optimizer='cpu'"
        )
    try:
        descriptor = _open(folder, os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ValueError(_without_direct_io(folder, kind)) from error
        raise ValueError(f"offload.path {str(folder)!r} cannot be written ({error.strerror}); {_REMEDY}") from error
    try:
        with mmap.mmap(-1, BLOCK) as block:
            os.pwritev(descriptor, [block], 0)
            os.preadv(descriptor, [block], 0)
            os.ftruncate(descriptor, 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EINVAL:
            raise ValueError(_without_direct_io(folder, kind)) from error
        raise ValueError(f"offload.path {str(folder)!r} cannot be written ({error.strerror}); {_REMEDY}") from error
    return descriptor


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of `folder`."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def file_system(folder: Path) -> str:
    """The type of the file system that holds `folder`, such as "ext4"; "unknown" where the system does not say."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        mount, _, description = line.partition(" - ")
        if mount.split()[2] == wanted:
            return description.split()[0]
    return "unknown"


def _open(folder: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    # This file system has no files without a name: the file has a name for an instant.
    descriptor, name = tempfile.mkstemp(prefix=".tensorshard-", dir=folder)
    try:
        return os.open(name, flags)
    finally:
        os.close(descriptor)
        os.unlink(name)


def _without_direct_io(folder: Path, kind: str) -> str:
    return (
        f"offload.path {str(folder)!r} is on {kind}, which does without direct I/O (O_DIRECT): what is written there "
        f"would fill the page cache, which is memory; {_REMEDY} (ext4 and xfs have it)"
    )
