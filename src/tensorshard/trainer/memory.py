"""Peak memory of this process, on whatever device it trains."""

import resource
import shutil
import subprocess
from pathlib import Path

import torch

from tensorshard.host.memory import status_bytes

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # this is written to /proc/self/clear_refs: see proc_pid_clear_refs(5)


COMPARED_MEMORY = 256 << 20
"""Bytes of live tensors from which on an estimate is compared with what is measured. Below, libraries and connections
are most of that."""


class PeakMemory:
    """The most bytes that were held since the last :meth:`reset`.

    On a GPU these are the bytes of live tensors in torch's caching allocator (without the CUDA context and
    the communicators' buffers); on a CPU they are the process's resident memory, the interpreter and
    libraries included.

    Args:
        device: the device that is trained on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        """Starts anew from what is held now. If the system forbids it, the process's peak stays."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:
            return  # not Linux, or a locked-down container

    def bytes(self) -> int:
        """The peak in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = status_bytes("VmHWM")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _ru_maxrss_unit() if peak is None else peak


def held_now(device: torch.device) -> int:
    """Bytes that are held now, of the kind that :class:`PeakMemory` counts; 0 if the system does not say."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else status_bytes("VmRSS") or 0


def _ru_maxrss_unit() -> int:
    """Bytes in one unit of ``ru_maxrss``: Linux counts KiB, macOS bytes."""
    import sys

    return 1 if sys.platform == "darwin" else 1024


_QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")


def memory_of_gpus() -> int | None:
    """Bytes of the smallest GPU; None without ``nvidia-smi``. It starts no CUDA context."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        output = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) for line in output.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
