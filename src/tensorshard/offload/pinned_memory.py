"""Memory of the host that a GPU reads and writes directly."""

import ctypes
import mmap

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: for every context of this process


class PinnedMemory(mmap.mmap):
    """Memory of whole pages, pinned until nothing refers to it any more, including the tensors that were made on it.

    Args:
        nbytes: how much.
        device: the CUDA device that copies from and to it.

    Raises:
        RuntimeError: the driver refuses.
    """

    _address: int | None = None

    def __new__(cls, nbytes: int, device: torch.device) -> "PinnedMemory":
        return super().__new__(cls, -1, nbytes)

    def __init__(self, nbytes: int, device: torch.device) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        with torch.cuda.device(device):  # else this thread would make a context on the first device
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if code != 0:
            raise RuntimeError(
                f"{nbytes:,} bytes of a buffer between {device} and the host's memory could not be pinned (CUDA error "
                f"{code}); set offload.buffer_memory to less"
            )
        self._address = address

    def __del__(self) -> None:
        if self._address is not None:  # at the end of the process it may be unpinned already
            torch.cuda.cudart().cudaHostUnregister(self._address)
