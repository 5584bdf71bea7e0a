"""How many cores there are for this process."""

import os


def cores_here() -> int:
    """How many of this machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
