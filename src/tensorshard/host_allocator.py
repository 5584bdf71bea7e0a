"""What glibc's allocator does with memory that is freed; with another C library, nothing here does anything.

A step allocates what the step before it allocated. By default glibc gives the end of a heap back to the system as soon
as it is free, and faults it in again; and tensors of up to 32 MiB, that come and go in other orders than smaller ones,
leave holes in the heap. A rank of GPT-2 of 4 layers held 2.5 GB so, and 2.1 GB with large tensors outside the heap.
"""

import ctypes
import os
from functools import cache

_MAPPED_BYTES = 16 << 20  # smaller tensors are often as large as a layer's weights: mapping these anew costs time
_TOP_BYTES = 32 << 20
_NEVER = (1 << 31) - 1

# By the names of glibc's environment variables, the options of mallopt (malloc.h) and what training sets them to.
_OPTIONS = {
    "MALLOC_MMAP_THRESHOLD_": (-3, _MAPPED_BYTES),
    "MALLOC_TRIM_THRESHOLD_": (-1, _NEVER),
    "MALLOC_TOP_PAD_": (-2, _TOP_BYTES),
}


def environment_for_training() -> dict[str, str]:
    """The variables under which a process is started whose heap keeps what small tensors leave, and no large tensor."""
    return {name: str(value) for name, (_, value) in _OPTIONS.items()}


@cache
def set_for_training() -> None:
    """The same for this process as it runs, unless the user has set one of the variables."""
    if not any(name in os.environ for name in _OPTIONS):
        for option, value in _OPTIONS.values():
            _set(option, value)


def map_tensors_from(nbytes: int) -> None:
    """Has freed tensors of so many bytes and more go back to the system at once. This is of the whole process."""
    _set(_OPTIONS["MALLOC_MMAP_THRESHOLD_"][0], nbytes)


def give_back_free_memory() -> None:
    """Has the free pages of the heaps go back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
