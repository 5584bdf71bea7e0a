"""A process group of which only this rank exists: what one rank computes, in shapes alone."""

from typing import Any

import torch
import torch.distributed as dist


class _Done(dist.distributed_c10d.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _Backend:
    def name(self) -> str:
        return "silent"


class SilentGroup(dist.ProcessGroup):
    """A group in which the others' tensors are taken to be like this rank's own. No bytes travel.

    Args:
        rank: of this process in it.
        size: how many ranks it pretends to have.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    def __deepcopy__(self, memo: dict[int, Any]) -> "SilentGroup":
        return self

    def getBackendName(self) -> str:
        return "silent"

    def _get_backend(self, device: torch.device) -> Any:
        return _Backend()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return _Done()

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        output.view(self.size(), -1).copy_(input.reshape(1, -1))
        return _Done()

    all_gather_single = _allgather_base  # what torch 2.13 calls it

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        output.copy_(input.reshape(-1)[: output.numel()].view_as(output))
        return _Done()

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def alltoall_base(  # type: ignore[override]
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        return _Done()

    all_to_all_single = alltoall_base  # type: ignore[assignment]
