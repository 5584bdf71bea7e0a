"""Memory that was freed, and that the C library keeps for the next allocation."""

import ctypes


def give_back_free_memory() -> None:
    """Has glibc give the free pages of its heaps back to the system; does nothing with another C library.

    A unit's parameters and gradients come and go, and glibc keeps most of what is freed: after a model was made unit by
    unit, a third of what the process held was of no use to anyone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
