"""How much memory and how many cores of this machine this process can have, and how much it holds."""

import os
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class HeldMemory:
    """Bytes of memory that only this process holds, without the files of libraries.

    Args:
        now: at this moment.
        peak: the most so far, or since someone reset the process's peak (:class:`.PeakMemory` does).
    """

    now: int
    peak: int


def held_memory() -> HeldMemory | None:
    """What this process holds; None if the system does not say."""
    sizes = _status_sizes()
    held, peak = sizes.get("RssAnon"), sizes.get("VmHWM")
    if held is None or peak is None:
        return None
    return HeldMemory(held, max(held, peak - sizes.get("RssFile", 0)))


def status_bytes(name: str) -> int | None:
    """A size in Linux's status of this process, such as "VmRSS" (proc_pid_status(5)); None if it is not there."""
    return _status_sizes().get(name)


def _status_sizes() -> dict[str, int]:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {name.removesuffix(":"): int(number) << 10 for name, number, _ in words}


def available_on_host() -> int | None:
    """Bytes that processes can still take: what Linux calls available, or what a cgroup's limit leaves, if that is
    less.

    None if the system does not say.
    """
    bounds = [bound for bound in (_available(), *_left_by_cgroups()) if bound is not None]
    return min(bounds, default=None)


def room_for_rank(ranks_here: int) -> int | None:
    """Bytes that this process can hold if `ranks_here` processes like it share what is available; None if the system
    does not say."""
    held, available = held_memory(), available_on_host()
    return None if held is None or available is None else held.now + available // ranks_here


def _available() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _left_by_cgroups() -> list[int]:
    """Bytes that the limits of this process's cgroup, and of its parents, leave."""
    try:
        named = [line.split(":", 2) for line in _OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return []
    left = []
    for _, controllers, path in named:
        if controllers == "":  # version 2
            root, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            bound = _left(place, *names)
            if bound is not None:
                left.append(bound)
            if place == root:
                break
    return left


def _left(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        bound, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if not bound.isdecimal():  # "max"
        return None
    freed = sum(int(line.split()[1]) for line in lines if line.split()[0] == cache)  # files that can be read again
    return max(0, int(bound) - used + freed)


def cores_here() -> int:
    """How many of this machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
