"""How much memory a region takes, and when it is over, on a processor and on a GPU."""

import ctypes
import gc
from typing import Protocol

import torch

from benchmarks.harness import memory


class Meter(Protocol):
    """One region at a time."""

    def start(self) -> None:
        """Begins a region: what is held now is not counted."""

    def peak_bytes(self) -> int:
        """The most held since then, above what was held at the start."""

    def synchronize(self) -> None:
        """Waits until all that was asked for is computed."""


class ResidentMemory:
    """Of this process, as Linux counts it."""

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
    """Of tensors on the current GPU, as PyTorch's allocator counts it."""

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
    """Of "cpu" or "cuda"."""
    return ResidentMemory() if device == "cpu" else AllocatedMemory()
