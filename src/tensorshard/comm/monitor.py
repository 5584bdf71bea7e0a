"""Checks, before each collective, that all ranks of a group are about to call the same one."""

from datetime import timedelta

import torch
import torch.distributed as dist

_MESSAGE_BYTES = 256


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group called different collectives, or one of them did not call any."""


class CollectiveMonitor:
    """Compares what the ranks of a group are about to call, over a Gloo group of its own.

    Args:
        side_group: the same ranks as the group that is watched; used for nothing else.
        ranks: their numbers in the world, for messages.
        timeout: of `side_group`, for messages.
    """

    def __init__(self, side_group: dist.ProcessGroup, ranks: list[int], timeout: timedelta | None) -> None:
        self._side_group = side_group
        self._ranks = ranks
        self._timeout = timeout
        self._calls = 0

    def close(self) -> None:
        """Frees the side group."""
        dist.destroy_process_group(self._side_group)

    def check(self, call: str) -> None:
        """Waits until every rank is about to make its next call, and compares the calls.

        Raises:
            CollectiveMismatchError: the calls differ, or a rank did not come within the timeout.
        """
        self._calls += 1
        text = call.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in self._ranks]
        try:
            dist.all_gather(everyone, mine, group=self._side_group)
        except RuntimeError as error:
            patience = f" within {self._timeout.total_seconds():.0f} s" if self._timeout else ""
            raise CollectiveMismatchError(
                f"not all of the ranks {self._ranks} reached collective number {self._calls} of their "
                f"group{patience}; rank {dist.get_rank()} was about to call {call}. A rank has failed, has "
                "left the loop early, or took a branch without this call."
            ) from error
        calls = [bytes(part.tolist()).decode().rstrip() for part in everyone]
        if len(set(calls)) > 1:
            listing = "; ".join(f"rank {rank}: {text}" for rank, text in zip(self._ranks, calls, strict=True))
            raise CollectiveMismatchError(
                f"the ranks of a group called different collectives as their number {self._calls}: "
                f"{listing}. Every rank of a group must make the same calls, of the same sizes, in the same "
                "order."
            )
