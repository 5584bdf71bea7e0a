"""How a parameter is laid out over the tensor-parallel ranks: full on each, or cut along one dimension."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorshard.comm.sharding import shard_range, shard_sizes


@dataclass(frozen=True)
class Layout:
    """Where the elements of one parameter are.

    Args:
        dim: the dimension that is cut; None for a parameter that every rank holds in full.
        parts: sizes along `dim` of the parts that the parameter consists of, in order. A fused query-key-value weight
            has three; most parameters are one part. Each part is cut over the ranks, and a rank holds its pieces in
            the same order.
    """

    dim: int | None = None
    parts: tuple[int, ...] = ()

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """The (start, length) along `dim` that rank `rank` of `size` holds, in its order."""
        starts = [sum(self.parts[:index]) for index in range(len(self.parts))]
        held = [shard_range(part, size, rank) for part in self.parts]
        return [(start + offset, length) for start, (offset, length) in zip(starts, held, strict=True)]

    def local_shape(self, shape: Sequence[int], rank: int, size: int) -> torch.Size:
        """The shape of what rank `rank` of `size` holds of a parameter of `shape`."""
        local = list(shape)
        if self.dim is not None:
            local[self.dim] = sum(length for _, length in self.ranges(rank, size))
        return torch.Size(local)


REPLICATED = Layout()
"""Every rank holds all of it."""


def local_shard(full: torch.Tensor, layout: Layout, rank: int, size: int) -> torch.Tensor:
    """The shard of `full` that rank `rank` of `size` holds: a copy, or `full` itself if that is all of it."""
    if layout.dim is None:
        return full
    pieces = [full.narrow(layout.dim, start, length) for start, length in layout.ranges(rank, size)]
    return pieces[0].clone(memory_format=torch.contiguous_format) if len(pieces) == 1 else torch.cat(pieces, layout.dim)


def shard_view(full: torch.Tensor, layout: Layout, rank: int, size: int, *, apart: bool = False) -> torch.Tensor:
    """As :func:`local_shard`, but a view of `full` where the shard is one contiguous piece of it.

    Args:
        apart: whether the shard may also be a view whose rows are not adjacent in memory.
    """
    in_place = apart or layout.dim == 0 or not full.is_contiguous()
    if layout.dim is not None and len(layout.parts) == 1 and in_place:
        return full.narrow(layout.dim, *layout.ranges(rank, size)[0])
    return local_shard(full, layout, rank, size)


def join_shards(held: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The full parameter, from the shards that the ranks hold (``held[rank]``): undoes :func:`local_shard`."""
    if layout.dim is None:
        return held[0]
    size = len(held)
    pieces: list[list[torch.Tensor]] = [
        list(local.split([length for _, length in layout.ranges(rank, size)], layout.dim))
        for rank, local in enumerate(held)
    ]
    return torch.cat([pieces[rank][part] for part in range(len(layout.parts)) for rank in range(size)], layout.dim)


def check_can_split(layout: Layout, size: int, what: str) -> None:
    """Raises if a layout would leave a rank without elements.

    Raises:
        ValueError: a part has fewer elements than there are ranks, or too few for the last rank to get one.
    """
    for part in layout.parts:
        if 0 in shard_sizes(part, size):
            packed = "" if len(layout.parts) == 1 else f" (one of the parts {', '.join(map(str, layout.parts))})"
            raise ValueError(
                f"{what} has {part} elements along dimension {layout.dim}{packed}, which cannot be split over {size} "
                f"ranks: each needs one at least; leave it replicated, or lower tp"
            )
