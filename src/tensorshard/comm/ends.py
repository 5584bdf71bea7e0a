"""What happens when a process that has joined a world ends without ``destroy_process_group``."""

import atexit
import threading
import time
from functools import cache
from pathlib import Path

_PATIENCE_SECONDS = 1.0
_PAUSE_SECONDS = 0.005
_QUIET_PAUSES = 4  # in a row; a thread may sleep between two calculations
_TASKS = Path("/proc/self/task")


@cache
def end_after_threads() -> None:
    """Lets the threads of Gloo finish before the interpreter is finalized, for at most a second. Once per process.

    A thread of Gloo may hold the tensors of a collective for a moment after its caller has gone on. If it lets go of
    them while the interpreter is finalized, the process aborts ("terminate called without an active exception":
    torch's pull request 179291), and a run that was over counts as failed. ``destroy_process_group`` here would wait
    for ranks that have failed.
    """
    atexit.register(wait_for_threads)


def wait_for_threads(patience: float = _PATIENCE_SECONDS) -> None:
    """Waits until no other thread of this process computes, or wants to, for at most `patience` seconds."""
    deadline, quiet = time.monotonic() + patience, 0
    while quiet < _QUIET_PAUSES and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)  # without the interpreter's lock, which a thread needs to free a tensor
        quiet = 0 if _another_runs() else quiet + 1


def _another_runs() -> bool:
    """Whether another thread runs or waits for a core; False where the kernel does not say."""
    own = str(threading.get_native_id())
    try:
        tasks = [task for task in _TASKS.iterdir() if task.name != own]
    except OSError:
        return False
    return any(_state(task) == "R" for task in tasks)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][:1]  # after the name, which may hold anything
    except OSError:  # it has ended
        return ""
