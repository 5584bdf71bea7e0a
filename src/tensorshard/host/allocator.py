"""Settings of glibc's allocator for memory that is freed. With another C library, nothing here has an effect.

Each step allocates the same memory as the step before. By default, glibc returns the end of a heap to the system as
soon as it is free, and then has to get it again. Tensors of up to 32 MiB are freed in another order than smaller ones,
and leave holes in the heap. With these holes, a rank of GPT-2 of 4 layers held 2.5 GB; with large tensors outside of
the heap, it held 2.1 GB. But the system clears such tensors anew each time, which took a tenth of a step. So only plans
that give time for memory keep them outside, and only where memory is scarce are all tensors outside
(:mod:`tensorshard.host.heap`).
"""

import ctypes
import os

KEEP_SMALL = 16 << 20
"""With this for :func:`map_tensors_from`, the heap keeps tensors below 16 MiB."""

KEEP_MOST = 32 << 20
"""With this, it keeps tensors below 32 MiB, the most that glibc keeps."""

_TOP_BYTES = 32 << 20
_NEVER = (1 << 31) - 1

# For each of glibc's environment variables: the option of mallopt (malloc.h), and the value for training.
_OPTIONS = {
    "MALLOC_MMAP_THRESHOLD_": (-3, KEEP_SMALL),
    "MALLOC_TRIM_THRESHOLD_": (-1, _NEVER),
    "MALLOC_TOP_PAD_": (-2, _TOP_BYTES),
}


def environment_for_training() -> dict[str, str]:
    """Environment variables for a process whose heap keeps memory freed by small tensors, and holds no large ones."""
    return {name: str(value) for name, (_, value) in _OPTIONS.items()}


def set_for_training(mapped_bytes: int) -> bool:
    """The same settings for this running process, with tensors of at least `mapped_bytes` outside of the heap.

    Returns:
        Whether it was done: not if the user has set one of the variables otherwise.
    """
    if any(os.environ.get(name, value) != value for name, value in environment_for_training().items()):
        return False
    for option, value in _OPTIONS.values():
        _set(option, value)
    map_tensors_from(mapped_bytes)
    return True


def map_tensors_from(nbytes: int) -> None:
    """Makes freed tensors of at least `nbytes` go back to the system at once, in the whole process."""
    _set(_OPTIONS["MALLOC_MMAP_THRESHOLD_"][0], nbytes)


def give_back_free_memory() -> None:
    """Returns the free pages of the heaps to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
