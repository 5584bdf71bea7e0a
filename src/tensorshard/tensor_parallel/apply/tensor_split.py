"""What a tensor-parallel rank has: shards of parameters, which are joined again, and parts of logits."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.collectives import all_gather_into
from tensorshard.loss.logits.linear_logits import split_logits
from tensorshard.tensor_parallel.table.layouts import REPLICATED, Layout, join_shards, local_shard, ranges_within
from tensorshard.torch_private.modules import own_buffers, set_buffer


def shard_buffers(model: nn.Module, layouts: Mapping[str, Layout], rank: int, size: int) -> None:
    """Replaces each full buffer of `model` that `layouts` names by the part that rank `rank` of `size` holds."""
    for prefix, module in model.named_modules():
        for key, buffer in own_buffers(module).items():
            layout = layouts.get(f"{prefix}.{key}" if prefix else key, REPLICATED)
            if layout.dim is not None:
                set_buffer(module, key, local_shard(buffer, layout, rank, size))


class SplitOutputs:
    """Whether output layers leave their outputs split.

    They do within a step, where every rank does the same with what the model returns. Elsewhere a single rank may use
    the output, to print it, say. So it must be whole.
    """

    def __init__(self) -> None:
        self._kept = False
        self.sizes: dict[nn.Module, int] = {}
        """The output layers, each with its number of features on all ranks together."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within this, outputs stay split until somebody needs the whole."""
        before, self._kept = self._kept, True
        try:
            yield
        finally:
            self._kept = before

    def finish(self, part: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        """The whole output of `size` features, or a tensor that stands for it. `part` is what this rank computed."""
        if self._kept:
            return split_logits(part, -1, size, group)
        return collectives.gather(part, -1, group, size=size)


class _Described(Protocol):
    def describe(self) -> str: ...


@dataclass(frozen=True)
class TensorSplit:
    """Layouts of parameters over a group of tensor-parallel ranks. By default nothing is split.

    Args:
        layouts: of every parameter, by each of its names, and of the buffers that are split.
        group: the ranks; None for a single one.
        table: the table that the layouts follow from.
        outputs: whether the output layers hand on split logits.
        of_data_ranks: whether the ranks have different samples, as those that share experts have.
        experts: how the parameters of experts are split, over other ranks; None where they are not.
        outer: the split whose parts these ranks split further; None where they split whole parameters.
    """

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None
    table: _Described | None = None
    outputs: SplitOutputs = field(default_factory=SplitOutputs)
    of_data_ranks: bool = False
    experts: "TensorSplit | None" = None
    outer: "TensorSplit | None" = None

    @property
    def splits(self) -> bool:
        """Whether there are several ranks, over which parameters may be split."""
        return self.size > 1 or self.experts is not None

    def of(self, name: str) -> "TensorSplit":
        """The split that the parameter `name` belongs to: this one, or that of experts."""
        return self.experts if self.experts is not None and name in self.experts.layouts else self

    def describe(self) -> str | None:
        """The tables that the layouts follow from, for people; None where nothing is sharded."""
        tables = [split.table.describe() for split in (self, self.experts) if split is not None and split.table]
        return "\n".join(tables) if tables else None

    def keep_outputs_split(self) -> AbstractContextManager[None]:
        """Within this, output layers leave their logits split over the ranks."""
        return self.outputs.kept()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def layout(self, name: str) -> Layout:
        """How these ranks split the parameter `name`, or the part of it that the outer split gives them."""
        return self.of(name).layouts.get(name, REPLICATED)

    def cuts(self, name: str) -> dict[int, list[tuple[int, int]]]:
        """What this rank has of the parameter `name`: the (start, length) of its pieces along each dimension that is
        cut, in their order in memory."""
        split, layout = self.of(name), self.layout(name)
        cuts = {} if split.outer is None else split.outer.cuts(name)
        if layout.dim is not None:
            cuts[layout.dim] = ranges_within(cuts.get(layout.dim), layout.ranges(split.rank, split.size))
        return cuts

    def num_shards(self, name: str) -> int:
        """Into how many shards the parameter `name` is cut."""
        split = self.of(name)
        outer = 1 if split.outer is None else split.outer.num_shards(name)
        return outer if self.layout(name).dim is None else outer * split.size

    def local(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the parameter `name`."""
        split = self.of(name)
        part = full if split.outer is None else split.outer.local(name, full)
        return local_shard(part, split.layout(name), split.rank, split.size)

    def local_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """The shape of this rank's shard of the parameter `name` of `shape`."""
        split = self.of(name)
        part = shape if split.outer is None else split.outer.local_shape(name, shape)
        return split.layout(name).local_shape(part, split.rank, split.size)

    def full_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """The full shape of the parameter or buffer `name`. `shape` is that of the shard, or full."""
        layout, outer = self.layout(name), self.of(name).outer
        full = list(shape)
        if layout.dim is not None:
            full[layout.dim] = sum(layout.parts)
        return torch.Size(full) if outer is None else outer.full_shape(name, torch.Size(full))

    def full(self, name: str, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The full parameter `name` of `shape`. Every rank passes its `local` part. A collective of the group."""
        if (owner := self.of(name)) is not self:
            return owner.full(name, local, shape)
        if self.outer is not None:
            part = self._joined(name, local, self.outer.local_shape(name, shape))
            return self.outer.full(name, part, shape)
        return self._joined(name, local, shape)

    def _joined(self, name: str, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What these ranks have together, of `shape`."""
        layout = self.layout(name)
        if layout.dim is None or self.group is None:
            return local
        shapes = [layout.local_shape(shape, rank, self.size) for rank in range(self.size)]
        longest = max(part.numel() for part in shapes)
        mine = local.reshape(-1)
        if mine.numel() < longest:
            mine = torch.cat([mine, mine.new_zeros(longest - mine.numel())])
        if layout.dim == 0 and len(layout.parts) == 1 and longest * self.size == shape.numel():
            full = local.new_empty(shape)  # the shards come in the right order, and nothing is copied
            all_gather_into(full.view(-1), mine, self.group)
            return full
        gathered = local.new_empty(longest * self.size)
        all_gather_into(gathered, mine, self.group)
        parts = [flat[: part.numel()].view(part) for flat, part in zip(gathered.chunk(self.size), shapes, strict=True)]
        return join_shards(parts, layout)
