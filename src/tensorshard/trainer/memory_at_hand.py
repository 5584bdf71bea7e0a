"""How much memory this machine has for a run: that of its GPUs, or the available memory of its host."""

import shutil
import subprocess
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")


def available_on_host() -> int | None:
    """Bytes that processes can still take: what Linux calls available, or what a cgroup's limit leaves, if that is
    less.

    None if the system does not say.
    """
    bounds = [bound for bound in (_available(), *_left_by_cgroups()) if bound is not None]
    return min(bounds, default=None)


def memory_of_gpus() -> int | None:
    """Bytes of the smallest GPU; None without ``nvidia-smi``. It starts no CUDA context."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        said = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) for line in said.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


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
