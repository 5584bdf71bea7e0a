"""What process groups without other processes share: they are done at once, and torch knows them by two names."""

from typing import Any

import torch
import torch.distributed as dist


class Done(dist.distributed_c10d.Work):
    """A collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _Backend:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class LocalGroup(dist.ProcessGroup):
    """A group inside of one process. Subclasses define the collectives by the names of torch 2.11.

    Attributes:
        backend: what it calls itself.
    """

    backend: str

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    def getBackendName(self) -> str:
        return self.backend

    def _get_backend(self, device: torch.device) -> Any:
        return _Backend(self.backend)

    # What torch 2.13 calls them.

    def all_gather_single(self, *args: Any) -> dist.Work:
        return self._allgather_base(*args)

    def reduce_scatter_single(self, *args: Any) -> dist.Work:
        return self._reduce_scatter_base(*args)

    def all_to_all_single(self, *args: Any) -> dist.Work:
        return self.alltoall_base(*args)
