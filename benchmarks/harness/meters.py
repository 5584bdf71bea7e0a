"""The peak memory of a region of code, and waiting for its end, on a CPU and on a GPU."""

import ctypes
import gc
from typing import Protocol

import torch

from benchmarks.harness import memory


class Meter(Protocol):
    """Measures one region at a time."""

    def start(self) -> None:
        """Begins a region. Memory that is held now does not count."""

    def peak_bytes(self) -> int:
        """The most memory since the start, beyond what was held at the start."""

    def synchronize(self) -> None:
        """Waits until all computation is done."""


class ResidentMemory:
    """Resident memory of this process, as Linux counts it."""

    def start(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        memory.reset_peak()
        self._held = memory.resident_bytes()

    def peak_bytes(self) -> int:
        return memory.peak_resident_bytes() - self._held

    def synchronize(self) -> None:
        pass


class AllocatedMemory:
    """Memory of tensors on the current GPU, as PyTorch's allocator counts it."""

    def start(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._held = torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._held

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def make_meter(device: str) -> Meter:
    """The meter for "cpu" or "cuda"."""
    return ResidentMemory() if device == "cpu" else AllocatedMemory()
