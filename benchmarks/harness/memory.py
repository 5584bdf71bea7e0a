"""Resident memory of this process, as Linux counts it."""

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


def resident_bytes() -> int:
    """Resident memory of the process now."""
    return _read("VmRSS")


def peak_resident_bytes() -> int:
    """The most resident memory since the process started, or since :func:`reset_peak`."""
    return _read("VmHWM")


def reset_peak() -> None:
    """Sets the peak to the resident memory of now."""
    _CLEAR_REFS.write_text(_RESET_PEAK)


def page_cache_bytes() -> int:
    """Memory of the machine that its page cache uses now."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Cached:"))
    return int(line.split()[1]) * 1024


def available_bytes() -> int:
    """Memory of the machine that programs can still use."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024


def disk_bytes() -> tuple[int, int]:
    """How many bytes the process had read from disks and written to them so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def _read(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
