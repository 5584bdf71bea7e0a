"""Copies between a device's memory and buffers in the host's memory, while the device computes.

The host updates offloaded states, since the optimizer's states and the master weights are in its memory. So gradients
and activations leave the device, and weights and activations come back. Each goes through a pinned buffer, which the
device reads and writes by itself, on a stream of its own. The streams are made once.

A copy runs after the work that the device was given before it. A thread of the host waits for the copy. Work that the
device is given after that finds the copy made.
"""

import ctypes
import mmap
from typing import Any

import torch

from tensorshard.comm.world import world
from tensorshard.torch_private.tensors import tensor_version

_PORTABLE = 1  # cudaHostRegisterPortable: for every context of this process


class CopyToHost:
    """A copy from the device that is under way. It keeps the memory that is read.

    Args:
        values: what is copied.
        owner: a tensor in the same memory. Its version shows whether the memory was changed.
        done: an event after the copy.
    """

    def __init__(self, values: torch.Tensor, owner: torch.Tensor, done: Any) -> None:
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = (values, owner)
        self._version = tensor_version(owner)
        self._done = done

    def wait(self) -> None:
        """Returns when the copy is made, and no longer keeps the memory.

        Raises:
            RuntimeError: the values were changed in place during the copy, so old and new ones may be mixed.
        """
        self._done.synchronize()
        kept, self._kept = self._kept, None
        if kept is not None and tensor_version(kept[1]) != self._version:
            raise RuntimeError(
                f"a tensor of shape {list(kept[1].shape)} that a block keeps for its gradient was changed in place "
                f"while it was copied from the device; change a clone of it, or set offload.activations=None"
            )


class DeviceCopies:
    """Makes the copies of one rank's device. On fake tensors there are none, and it has no streams.

    Args:
        device: one with memory of its own. The CPU may be given, too, to try the code without such a device: its
            streams do everything at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._on_gpu = device.type != "cpu"
        if not world().is_simulated:
            self._to_host, self._to_device = (
                self._module.Stream(device) if self._on_gpu else self._module.Stream() for _ in range(2)
            )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in the device's memory."""
        return tensor.device.type == self.device.type

    def buffer(self, nbytes: int) -> mmap.mmap:
        """Memory of the host, aligned to pages, which the device copies from and to.

        Raises:
            RuntimeError: the driver refuses to pin so much.
        """
        return (
            PinnedMemory(nbytes, self.device, "set offload.buffer_memory to less")
            if self._on_gpu
            else mmap.mmap(-1, nbytes)
        )

    def make_current(self) -> None:
        """Makes the device that of the calling thread, as each thread that copies has to.

        A new thread's is the first one, and leaving ``torch.cuda.stream`` goes back to it. That would make a context of
        hundreds of MB there for every rank of the machine.
        """
        if self._on_gpu and not world().is_simulated:
            self._module.set_device(self.device)

    def given(self) -> Any:
        """An event after all work that the calling thread's stream has so far; None on fake tensors."""
        if world().is_simulated:
            return None
        event = self._event()
        event.record(self._module.current_stream(self.device))
        return event

    def to_host(
        self, into: torch.Tensor, values: torch.Tensor, after: Any, owner: torch.Tensor | None = None
    ) -> CopyToHost:
        """Begins to copy `values`, on the device, to the pinned tensor `into`.

        Args:
            after: an event of :meth:`given`, after which `values` are there.
            owner: a tensor in the same memory, whose version shows in-place changes; None for `values`.
        """
        return CopyToHost(values, values if owner is None else owner, self._begin(self._to_host, into, values, after))

    def to_device(self, into: torch.Tensor, values: torch.Tensor, after: Any) -> None:
        """Copies `values`, pinned, to the tensor `into` on the device; returns when that is done.

        Args:
            after: an event of :meth:`given`, after which nothing needs the old values of `into`.
        """
        self._begin(self._to_device, into, values, after).synchronize()

    def _begin(self, stream: Any, into: torch.Tensor, values: torch.Tensor, after: Any) -> Any:
        done = self._event()
        with torch.no_grad(), self._module.stream(stream):  # inside this, the stream's device is that of the thread
            stream.wait_event(after)
            into.copy_(values, non_blocking=True)
            done.record(stream)
        return done

    def _event(self) -> Any:
        # A thread that waits for a blocking event sleeps, and leaves the processor to the update.
        return self._module.Event(blocking=True) if self._on_gpu else self._module.Event()


class PinnedMemory(mmap.mmap):
    """Memory of whole pages, pinned until nothing refers to it any more, including the tensors that were made on it.

    Args:
        nbytes: how much.
        device: the CUDA device that copies from and to it.
        instead: what to do where the driver refuses.

    Raises:
        RuntimeError: the driver refuses.
    """

    _address: int | None = None

    def __new__(cls, nbytes: int, device: torch.device, instead: str) -> "PinnedMemory":
        return super().__new__(cls, -1, nbytes)

    def __init__(self, nbytes: int, device: torch.device, instead: str) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        with torch.cuda.device(device):  # else this thread would make a context on the first device
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if code != 0:
            raise RuntimeError(
                f"{nbytes:,} bytes of a buffer between {device} and the host's memory could not be pinned (CUDA error "
                f"{code}); {instead}"
            )
        self._address = address

    def __del__(self) -> None:
        if self._address is not None:  # at the end of the process it may be unpinned already
            torch.cuda.cudart().cudaHostUnregister(self._address)
