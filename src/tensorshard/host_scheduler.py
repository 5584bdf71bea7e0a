"""Tells Linux to schedule this process as a batch job, which does not interrupt other work when it wakes up.

A rank that sends a message to another rank on its machine wakes that rank up. By default Linux then often runs the
woken thread in place of the sender, which still holds the lock of Gloo's connection. Until the sender goes on, Gloo's
other thread polls in vain for that lock. With four ranks on two cores, an all-reduce of 16 KiB between two of them took
3.3 ms, of which 1.3 were spent on polling. As batch jobs they take 0.4 ms.
"""

import os
from contextlib import suppress

_THREADS = "/proc/self/task"


def schedule_as_batch() -> None:
    """Makes all threads of this process, and those that they start, batch jobs (``SCHED_BATCH``).

    Threads with a policy of their own keep it. Outside of Linux, or where the system does not allow it, nothing is
    changed.
    """
    if not hasattr(os, "SCHED_BATCH") or not os.path.isdir(_THREADS):
        return
    for name in os.listdir(_THREADS):
        with suppress(OSError):  # it has ended, or a container forbids the call
            if os.sched_getscheduler(int(name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(name), os.SCHED_BATCH, os.sched_param(0))
