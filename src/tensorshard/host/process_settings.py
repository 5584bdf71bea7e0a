"""What a process that only computes one rank on CPUs does with its scheduler's policy and its freed memory.

These are settings of the whole process. So they are made only where the environment variable
``TENSORSHARD_PROCESS_SETTINGS`` is 1: workers that tensorshard launches set it for themselves, unless it is 0.

**Scheduler.** The process becomes a batch job: it does not interrupt other work when it wakes up, and computes for long
without an interruption. A rank that sends a message to another rank on its machine wakes that rank up. By default Linux
then often runs the woken thread in place of the sender, which still holds the lock of Gloo's connection. Until the
sender goes on, Gloo's other thread polls in vain for that lock. With four ranks on two cores, an all-reduce of 16 KiB
between two of them took 3.3 ms, of which 1.3 were spent on polling. As batch jobs they take 0.4 ms. The same happens to
a sender whose slice of time is over: a slice is about 3 ms, but Linux looks at it only at a timer interrupt or when it
wakes a thread up, which sending does. An all-reduce after 7 ms of matrix products took 1.5 ms of polling, and takes
0.05 ms with slices of 30 ms (Linux 6.12 and later: man 2 sched_setattr, sched_runtime).

**Freed memory.** Each step allocates the same memory as the step before. By default, glibc returns the end of a heap to
the system as soon as it is free, and then has to get it again, cleared anew, which takes a tenth of a step or more. But
holes between tensors cannot always be used again: small GPTs held 1.1 to 1.7 times as much, and a rank of GPT-2 of 4
layers 2.5 GB in place of 2.1. So the first steps give everything back at once, which shows how much a step needs. Only
then is it known whether there is room to keep freed memory. Plans that give time for memory keep large tensors outside
of the heap all the same. With another C library, nothing of this has an effect.
"""

import ctypes
import logging
import os
import platform
from contextlib import suppress

from tensorshard.host.memory import held_memory, room_for_rank

logger = logging.getLogger("tensorshard")

_ALLOWED = "TENSORSHARD_PROCESS_SETTINGS"

_THREADS = "/proc/self/task"
_SLICE = 30_000_000  # nanoseconds; longer slices than 10 ms make no difference on two cores
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}  # the system call


def allow_process_settings() -> None:
    """Says that this process only computes a rank. It stands if the user has said otherwise."""
    os.environ.setdefault(_ALLOWED, "1")


def _may_set_process() -> bool:
    return os.environ.get(_ALLOWED) == "1"


def schedule_as_batch() -> None:
    """Makes all threads of this process, and those that they start, batch jobs (``SCHED_BATCH``) with long slices.

    It does so only where :func:`allow_process_settings` was called, or the user allows it.
    Threads with a policy of their own keep it. Outside of Linux, or where the system does not allow it, nothing is
    changed. Linux before 6.12 keeps its slices.
    """
    if not _may_set_process() or not hasattr(os, "SCHED_BATCH") or not os.path.isdir(_THREADS):
        return
    for name in os.listdir(_THREADS):
        with suppress(OSError):  # it has ended, or a container forbids the call
            if os.sched_getscheduler(int(name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(name), os.SCHED_BATCH, os.sched_param(0))
                _set_slice(int(name))


class _Attributes(ctypes.Structure):
    """The ``struct sched_attr`` of Linux (sched_setattr(2))."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def _set_slice(thread: int) -> None:
    """Gives a batch job's thread long slices, where the system can."""
    call = _SCHED_SETATTR.get(platform.machine())
    if call is not None:
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        wanted = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_BATCH, 0, nice, 0, _SLICE, 0, 0)
        ctypes.CDLL(None).syscall(call, thread, ctypes.byref(wanted), 0)


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
    """Environment variables for a process whose heap keeps memory freed by small tensors, and holds no large ones.

    None of them if the user wants no such settings.
    """
    if os.environ.get(_ALLOWED) == "0":
        return {}
    return {name: str(value) for name, (_, value) in _OPTIONS.items()}


def set_for_training(mapped_bytes: int) -> bool:
    """The same settings for this running process, with tensors of at least `mapped_bytes` outside of the heap.

    Returns:
        Whether it was done: not in a process whose settings are the user's, or if the user has set one of the
        variables otherwise.
    """
    users_own = any(os.environ.get(name, value) != value for name, value in environment_for_training().items())
    if users_own or not _may_set_process():
        return False
    for option, value in _OPTIONS.values():
        _set(option, value)
    map_tensors_from(mapped_bytes)
    return True


def map_tensors_from(nbytes: int) -> None:
    """Makes freed tensors of at least `nbytes` go back to the system at once, if this process's settings may change."""
    _set(_OPTIONS["MALLOC_MMAP_THRESHOLD_"][0], nbytes)


def give_back_free_memory() -> None:
    """Returns the free pages of the heaps to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if _may_set_process() else None
    if mallopt is not None:
        mallopt(option, value)


_ROOM = 2.0  # a rank keeps what is freed if it may hold so many times its peak
_NO_ROOM = 1.1  # below this, it gives it back again
_FIRST, _EVERY = 8, 8  # it looks at the memory after each of the first calls, then after every so many

_SPARING = 256 << 10  # bytes of tensors that are given back at once. Smaller ones leave no holes to speak of


class HostHeap:
    """Sets glibc's allocator for the steps of one Engine, from what this process holds and what is available to it.

    Making it sets the allocator to spare memory. If the user has set glibc's variables, they stand.

    Args:
        spares_memory: whether only small tensors are kept, as plans do that spare memory.
        keeps_nothing: whether nothing is kept, as where parameters are offloaded.
        ranks_here: how many ranks share this machine's memory.
        say: whether to log that memory is scarce.
    """

    def __init__(
        self, ranks_here: int, *, spares_memory: bool = False, keeps_nothing: bool = False, say: bool = False
    ) -> None:
        self._keeping_from = KEEP_SMALL if spares_memory else KEEP_MOST
        self._ranks_here = ranks_here
        self._say = say
        self._calls = 0
        self._is_set = set_for_training(_SPARING) and not keeps_nothing
        self.keeps = False

    def after_call(self) -> None:
        """Looks at the memory after each of the first calls that ran the model (steps, evaluations), and now and then
        later."""
        self._calls += 1
        if not self._is_set or (self._calls > _FIRST and self._calls % _EVERY):
            return
        held, room = held_memory(), room_for_rank(self._ranks_here)
        if held is None or room is None:
            return
        times = room / held.peak
        if self.keeps and times < _NO_ROOM:
            self.keeps = False
            map_tensors_from(_SPARING)
            give_back_free_memory()
        elif not self.keeps and times >= _ROOM:
            self.keeps = True
            map_tensors_from(self._keeping_from)
        if not self.keeps and self._calls > 1 and self._say:
            self._say = False
            logger.info(
                "memory is scarce: this rank held %d MiB of the %d MiB that it can have; so memory that is freed goes "
                "back to the system at once, and steps take longer",
                held.peak >> 20,
                room >> 20,
            )
