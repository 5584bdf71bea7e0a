"""Settings of glibc's allocator for memory that is freed. With another C library, nothing here has an effect.

Each step allocates the same memory as the step before. By default, glibc returns the end of a heap to the system as
soon as it is free, and then has to get it again. Tensors of up to 32 MiB are freed in another order than smaller ones,
and leave holes in the heap. With these holes, a rank of GPT-2 of 4 layers held 2.5 GB; with large tensors outside of
the heap, it held 2.1 GB. But the system clears such tensors anew each time, which took a tenth of a step. So only plans
that give time for memory keep them outside.
"""

import ctypes
import os

_MAPPED_BYTES = 16 << 20  # 16 MiB, since mapping smaller tensors again in each step costs time
_MOST_MAPPED_BYTES = 32 << 20  # glibc takes no more
_TOP_BYTES = 32 << 20
_NEVER = (1 << 31) - 1

# For each of glibc's environment variables: the option of mallopt (malloc.h), and the value for training.
_OPTIONS = {
    "MALLOC_MMAP_THRESHOLD_": (-3, _MAPPED_BYTES),
    "MALLOC_TRIM_THRESHOLD_": (-1, _NEVER),
    "MALLOC_TOP_PAD_": (-2, _TOP_BYTES),
}


def environment_for_training() -> dict[str, str]:
    """Environment variables for a process whose heap keeps memory freed by small tensors, and holds no large ones."""
    return {name: str(value) for name, (_, value) in _OPTIONS.items()}


def set_for_training(*, spare_memory: bool = True) -> None:
    """The same settings for this running process, unless the user has set one of the variables otherwise.

    Args:
        spare_memory: whether tensors of 16 to 32 MiB stay outside of the heap, too.
    """
    if any(os.environ.get(name, value) != value for name, value in environment_for_training().items()):
        return
    for option, value in _OPTIONS.values():
        _set(option, value)
    if not spare_memory:
        map_tensors_from(_MOST_MAPPED_BYTES)


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
