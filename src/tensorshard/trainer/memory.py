"""Peak memory of this process, on whatever device it trains."""

import resource
import shutil
import subprocess
from pathlib import Path

import torch

from tensorshard.host.memory import status_bytes
from tensorshard.predict.hardware import Hardware, assumed_cpu, measured_here, profile_of_gpu

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


_QUERY = ("--query-gpu=memory.total,name", "--format=csv,noheader,nounits")


def memory_of_gpus() -> int | None:
    """Bytes of the smallest GPU; None without ``nvidia-smi``. It starts no CUDA context."""
    gpu = _smallest_gpu()
    return None if gpu is None else gpu[0]


def hardware_of_run(*, gpus: bool) -> Hardware | None:
    """What this machine's ranks compute on: as ``tensorshard check`` measured it, else the profile of its GPU, else a
    CPU whose speed is assumed; None for a GPU of which nothing is known. It starts no CUDA context."""
    measured = measured_here(gpus=gpus)
    if measured is not None or not gpus:
        return measured or assumed_cpu()
    gpu = _smallest_gpu()
    return None if gpu is None else profile_of_gpu(gpu[1], gpu[0])


def gpu_name() -> str | None:
    """What the driver calls the GPU with the least memory; None without ``nvidia-smi``."""
    gpu = _smallest_gpu()
    return None if gpu is None else gpu[1]


def _smallest_gpu() -> tuple[int, str] | None:
    """Bytes and name of the GPU with the least memory."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        output = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=20, check=True).stdout
        lines = [line.split(",", 1) for line in output.splitlines() if line.strip()]
        return min((int(memory) << 20, name.strip()) for memory, name in lines)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
