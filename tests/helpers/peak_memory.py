"""How much memory something takes at its peak."""

from collections.abc import Callable

from tensorshard.host.process_settings import give_back_free_memory


def peak_memory_of(action: Callable[[], object]) -> int:
    """Bytes by which the process's resident memory grows, at most, during `action`."""

    def resident(field: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024

    give_back_free_memory()  # or what an earlier test freed would be used first
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # VmHWM starts again from the present size
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before
