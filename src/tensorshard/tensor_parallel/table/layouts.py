"""What a tensor-parallel rank has of a parameter, and of a block's sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tensorshard.comm.sharding import shard_range, shard_sizes


@dataclass(frozen=True)
class Layout:
    """Where the elements of one parameter are: all on each rank, or cut along one dimension.

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
        pieces = [shard_range(part, size, rank) for part in self.parts]
        return [(start + offset, length) for start, (offset, length) in zip(starts, pieces, strict=True)]

    def local_shape(self, shape: Sequence[int], rank: int, size: int) -> torch.Size:
        """The shape of what rank `rank` of `size` holds of a parameter of `shape`."""
        local = list(shape)
        if self.dim is not None:
            local[self.dim] = sum(length for _, length in self.ranges(rank, size))
        return torch.Size(local)


@dataclass(frozen=True)
class OwnedLayout(Layout):
    """A parameter that one rank holds whole; the others hold none of it.

    Args:
        owner: the rank.
    """

    owner: int = 0

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        return [(0, self.parts[0] if rank == self.owner else 0)]


REPLICATED = Layout()
"""Every rank holds all of it."""


def ranges_within(outer: Sequence[tuple[int, int]] | None, inner: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges (start, length) `inner` of what consists of the ranges `outer`, counted as those are. None: of all."""
    if outer is None:
        return list(inner)
    ranges = []
    for start, length in inner:
        position = 0
        for first, count in outer:
            low, high = max(start, position), min(start + length, position + count)
            if low < high:
                ranges.append((first + low - position, high - low))
            position += count
    return ranges


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


def join_shards(shards: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The full parameter, from the shards that the ranks hold (``shards[rank]``): undoes :func:`local_shard`."""
    if layout.dim is None:
        return shards[0]
    size = len(shards)
    pieces: list[list[torch.Tensor]] = [
        list(local.split([length for _, length in layout.ranges(rank, size)], layout.dim))
        for rank, local in enumerate(shards)
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


@dataclass(frozen=True)
class SequenceSplit:
    """How one block computes on its part of a sequence (Korthikanti et al. 2022). Names are relative to the block.

    Or a module between blocks, such as the last norm: of it nothing is split but the positions.

    Between the split layers, each rank has some of the positions and all features. Within the split layers, it has all
    positions and some of the features.

    Args:
        ndim: number of dimensions of the input that is split.
        dim: the dimension of the sequence.
        input: index of the tensor input that is split, among the leaves of (args, kwargs).
        outputs: indices of the tensor outputs that are split.
        columns: column layers that read the sequence, and whether they gather their input themselves. If not, a module
            around them gathers it.
        modules: modules that gather some of their tensor inputs when they are called: the indices of these inputs.
        whole: modules that are not split and mix positions. Each rank runs all of them, on the whole sequence. For
            each: the indices of the tensor inputs to gather, and of the outputs to cut.
        rows: row layers, whose summed output is scattered along the sequence.
        partial: parameters that are applied to parts of the sequence, so their gradients have to be summed.
        attentions: split ``nn.MultiheadAttention`` modules that read the sequence: the indices of their tensor inputs
            that come in parts.
        scatters: whether the input comes whole and has to be cut.
        gathers: whether the outputs are needed whole.
        copied: for modules in `modules`, the inputs that come in full from outside of the sequence. Each rank computes
            something else with them, so their gradients are summed.
        reshapes: whether reshapes of tensors with all positions ask for the length of a part, and have to be corrected.
    """

    ndim: int
    dim: int
    input: int
    outputs: tuple[int, ...]
    columns: Mapping[str, bool]
    modules: Mapping[str, tuple[int, ...]]
    whole: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    rows: tuple[str, ...]
    partial: tuple[str, ...]
    scatters: bool = False
    gathers: bool = False
    attentions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reshapes: bool = False
    copied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def linked(self, *, scatters: bool, gathers: bool) -> "SequenceSplit":
        """A copy of this split that scatters its input, or gathers its outputs, as given."""
        return replace(self, scatters=scatters, gathers=gathers)

    @property
    def is_between(self) -> bool:
        """Whether it is of a module between blocks."""
        return not (self.columns or self.attentions or self.whole)

    def describe(self) -> str:
        """Describes the split in a few words, without names of parameters."""
        if self.is_between:
            return f"dim {self.dim}, each position by itself"
        places = [*(name for name, alone in self.columns.items() if alone), *self.modules, *self.attentions]
        whole = f", whole in {', '.join(self.whole)}" if self.whole else ""
        return f"dim {self.dim}, gathered for {', '.join(places)}, scattered by {', '.join(self.rows)}{whole}"
