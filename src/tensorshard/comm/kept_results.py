"""Results of collectives over the ranks that share a batch, kept so that another forward can get the same ones.

What a forward sums or gathers over all data ranks is of the whole batch. To see whether it also depends on the samples
that a rank happens to have beside each other, it is run with others of them, while such results stay as they were.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class KeptResults:
    """The results of the collectives of one forward.

    Args:
        group: the ranks that share the batch; results over others are left alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._kept: list[list[torch.Tensor]] = []
        self._next: int | None = None  # that is repeated; None while they are recorded

    def forget(self) -> None:
        """Forgets what was noted. The next forward is noted anew."""
        self._kept, self._next = [], None

    def any(self) -> bool:
        """Whether the forward that was noted had results of collectives."""
        return bool(self._kept)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around a forward: the results of the first one are noted. Later ones get these, in their order."""
        _active.append(self)
        try:
            yield
        finally:
            _active.remove(self)
            self._next = 0

    @torch.no_grad()
    def replace(self, tensors: list[torch.Tensor]) -> None:
        """Notes `tensors`, or writes the noted ones into them."""
        if self._next is None:
            self._kept.append([tensor.clone() for tensor in tensors])
            return
        kept = self._kept[self._next] if self._next < len(self._kept) else []
        self._next += 1
        if [tensor.shape for tensor in tensors] == [tensor.shape for tensor in kept]:
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.copy_(values)


_active: list[KeptResults] = []


def as_kept(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`tensor`, the result of a collective over `group`, with the values that were kept of it if there are any."""
    if _active and group is _active[-1].group:
        _active[-1].replace([tensor])
    return tensor
