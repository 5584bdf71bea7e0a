"""Memory that was freed, and that the C library would keep for the next allocation."""

import ctypes

_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BYTES = 1 << 20


def map_large_tensors() -> None:
    """Has glibc give tensors of 1 MiB and more back to the system when they are freed; nothing with another C library.

    A unit's parameters and gradients come and go, and from its heaps glibc gives little back: a process that trained 24
    small blocks held 1.9 GB in its second step, and 0.5 GB so. This is of the whole process.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def give_back_free_memory() -> None:
    """Has glibc give the free pages of its heaps back to the system; does nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
