"""Finds addresses of this process that belong to files: what is offloaded to disk looks as if it were in memory."""

from bisect import bisect_right
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_IN_MEMORY = ("/dev/shm", "/memfd:", "/dev/zero")


class MappedFiles:
    """The files on disks that are mapped as shared at this moment; see proc_pid_maps(5)."""

    def __init__(self) -> None:
        found = []
        try:
            lines = _MAPS.read_text().splitlines()
        except OSError:
            lines = []  # not Linux
        for line in lines:
            span, permissions, _, _, inode, *path = line.split(maxsplit=5)
            if permissions.endswith("s") and inode != "0" and not (path and path[0].startswith(_IN_MEMORY)):
                start, _, end = span.partition("-")
                found.append((int(start, 16), int(end, 16)))
        self._spans = sorted(found)

    def hold(self, address: int) -> bool:
        """Whether `address` is in one of them."""
        place = bisect_right(self._spans, (address, 1 << 64)) - 1
        return place >= 0 and address < self._spans[place][1]
