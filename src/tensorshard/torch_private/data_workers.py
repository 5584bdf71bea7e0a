"""The processes of a DataLoader."""

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as worker_module


def become_only_reader() -> tuple[int, int]:
    """Lets the data set of this process take itself for the only reader; returns the worker's number, and of how many.

    Why: streams deal themselves over the workers, each in its own way. The order of the samples would then depend on
    the number of workers.

    Checked: torch 2.13.

    Public way: none.
    """
    info = get_worker_info()
    if info is None:
        return 0, 1
    worker_module._worker_info = None
    return info.id, info.num_workers
