"""A limit on the memory of some processes together, page cache included: a memory cgroup of Linux.

It needs rights that a user seldom has (root, or a delegated group). Without them, processes run without a limit, and
their use is sampled: their own memory, and by how much the machine's page cache grew.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import memory

JOIN = "BENCHMARK_MEMORY_GROUP"
"""The variable that tells a rank which group to join."""

_ROOT = Path("/sys/fs/cgroup")
_POLL_SECONDS = 0.02


@dataclass
class MemoryUse:
    """The memory use of a group's processes.

    Args:
        limited: whether there was a limit.
        peak_bytes: the most at any time, page cache included; known when the group ends.
        killed: whether the system killed a process because of the limit.
    """

    limited: bool
    peak_bytes: int = 0
    killed: bool = False


@contextmanager
def limited_memory(limit_bytes: int) -> Iterator[tuple[dict[str, str], MemoryUse]]:
    """Inside, ranks that get the variables and call :func:`join` share `limit_bytes` of memory.

    Yields:
        Environment variables for the ranks, and their memory use, which is filled in as it becomes known.
    """
    group = _make_group(limit_bytes)
    if group is None:
        use = MemoryUse(limited=False)
        with _sampled_page_cache(use):
            yield {}, use
        return
    use = MemoryUse(limited=True)
    try:
        yield {JOIN: str(group)}, use
    finally:
        use.peak_bytes = _peak(group)
        use.killed = _kills(group) > 0
        _remove(group)


def can_limit() -> bool:
    """Whether a limit would be enforced."""
    group = _make_group(1 << 30)
    if group is not None:
        _remove(group)
    return group is not None


def join() -> None:
    """From now on, counts this process's memory in the group that the caller named, if any."""
    if JOIN in os.environ:
        Path(os.environ[JOIN], "cgroup.procs").write_text(str(os.getpid()))


def _make_group(limit_bytes: int) -> Path | None:
    name = f"benchmark-{os.getpid()}"
    if (_ROOT / "memory").is_dir():  # version 1
        group, limits = _ROOT / "memory" / name, {"memory.limit_in_bytes": str(limit_bytes), "memory.swappiness": "0"}
    else:
        group, limits = _ROOT / name, {"memory.max": str(limit_bytes), "memory.swap.max": "0"}
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        for file, value in limits.items():
            (group / file).write_text(value)
    except OSError:
        group.rmdir()
        return None
    return group


def _peak(group: Path) -> int:
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text())
    return 0


def _kills(group: Path) -> int:
    for name in ("memory.oom_control", "memory.events"):
        if (group / name).exists():
            counts = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def _remove(group: Path) -> None:
    for _ in range(500):
        try:
            group.rmdir()
        except OSError:  # killed processes take a while to end
            time.sleep(_POLL_SECONDS)
        else:
            return


@contextmanager
def _sampled_page_cache(use: MemoryUse) -> Iterator[None]:
    before, over = memory.page_cache_bytes(), threading.Event()

    def sample() -> None:
        while not over.wait(_POLL_SECONDS):
            use.peak_bytes = max(use.peak_bytes, memory.page_cache_bytes() - before)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield
    finally:
        over.set()
        sampler.join()
