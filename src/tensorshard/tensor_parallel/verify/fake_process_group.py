"""A process group in which only this rank exists. It shows the shapes that one rank computes."""

import torch
import torch.distributed as dist

from tensorshard.torch_private.process_groups import LocalGroup


def fake_process_group(rank: int, size: int) -> dist.ProcessGroup:
    """A group that treats the other ranks' tensors as equal to this rank's. No bytes are sent.

    Args:
        rank: this process's rank in the group.
        size: the number of ranks that the group pretends to have.
    """
    return LocalGroup(_Silent(size), rank, size)


class _Silent:
    name = "silent"

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Does nothing: only shapes count."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.view(self._size, -1).copy_(input.reshape(1, -1))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(input.reshape(-1)[: output.numel()].view_as(output))

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        """Does nothing: only shapes count."""
