"""A process group of which only this rank exists: what one rank computes, in shapes alone."""

from typing import Any

import torch
import torch.distributed as dist

from tensorshard.tensor_parallel.verify.local_group import Done, LocalGroup


class FakeProcessGroup(LocalGroup):
    """A group in which the others' tensors are taken to be like this rank's own. No bytes travel.

    Args:
        rank: of this process in it.
        size: how many ranks it pretends to have.
    """

    backend = "silent"

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeProcessGroup":
        return self

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return Done()

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        output.view(self.size(), -1).copy_(input.reshape(1, -1))
        return Done()

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        output.copy_(input.reshape(-1)[: output.numel()].view_as(output))
        return Done()

    def alltoall_base(  # type: ignore[override]
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        return Done()
