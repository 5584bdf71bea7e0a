"""How much memory something takes at its peak."""

from collections.abc import Callable
from typing import TypeVar

from rank_pool import RankPool

_Result = TypeVar("_Result")


def in_a_new_process(function: Callable[[], _Result]) -> _Result:
    """What `function` returns in a process whose heap has no holes yet: large tensors in those would stay resident."""
    pool = RankPool()
    try:
        result: _Result = pool(1, function)[0]
        return result
    finally:
        pool.close()


def peak_memory_of(action: Callable[[], object]) -> int:
    """Bytes by which the process's resident memory grows, at most, during `action`."""

    def resident(field: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024

    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # VmHWM starts again from the present size
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before
