"""Finds out whether a folder can hold scratch files, before anything is allocated."""

import errno
import mmap
import os
import tempfile
from pathlib import Path

BLOCK = 4096
"""Direct I/O needs file offsets, lengths and addresses in multiples of this."""

# File systems in memory: files in them take the memory that offload should free.
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_REMEDY = "set offload.path to a folder on a local disk"


def scratch_folder(path: str | None) -> Path:
    """The folder that a plan's ``offload.path`` means."""
    return Path(tempfile.gettempdir() if path is None else path)


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
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


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
