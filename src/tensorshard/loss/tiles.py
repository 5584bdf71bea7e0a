"""The classes of a rank, a tile at a time: their logits in one buffer, and the largest of them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tensorshard.comm import primitives
from tensorshard.comm.sharding import to_local
from tensorshard.comm.world import world
from tensorshard.common.sampled_loops import loop_slices
from tensorshard.loss.formulas import cap, local_columns


@dataclass(frozen=True)
class Precision:
    """The types in which a head computes.

    Args:
        compute: of the factors of matrix products. On the CPU it is `wide`: products of narrower types are slow there.
        wide: of logits, sums and gradients during their computation: fp32, or fp64 for fp64 tensors.
    """

    compute: torch.dtype
    wide: torch.dtype

    @classmethod
    def choose(cls, input: torch.Tensor, autocast: torch.dtype | None) -> "Precision":
        """The types for an input, with the type of autocast if that is on."""
        if input.dtype == torch.float64:
            return cls(torch.float64, torch.float64)
        if world().on_cpu(input.device):
            return cls(torch.float32, torch.float32)
        return cls(autocast or input.dtype, torch.float32)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The type of an enclosing ``torch.autocast`` for the device of `tensor`, or None."""
    if tensor.is_meta:
        return None
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which operations on the device of `tensor` compute in the types that they are given."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


# A tile's logits and rows of the weight together take about this many bytes: on the CPU what the caches of two cores
# hold (widths of 1024 to 2048 were fastest at 256 samples of 512 features), elsewhere enough to fill a GPU.
_CPU_BYTES = 6 << 20
_DEVICE_BYTES = 256 << 20
_NARROWEST, _WIDEST = 512, 1 << 16
_MULTIPLE = 128
_SMALLEST_NORM = 1e-12  # as in F.normalize


@dataclass(frozen=True)
class Tile:
    """Some classes.

    Args:
        index: of the tile.
        begin, end: its columns among those computed.
        rows: their positions among the rank's classes: a slice, or numbers if the classes are a sample.
    """

    index: int
    begin: int
    end: int
    rows: slice | torch.Tensor

    @property
    def width(self) -> int:
        return self.end - self.begin


def tile_width(samples: int, features: int, device: torch.device) -> int:
    """How many classes make a tile."""
    size = _CPU_BYTES if world().on_cpu(device) else _DEVICE_BYTES
    width = size // (4 * max(1, samples + features)) // _MULTIPLE * _MULTIPLE
    return min(max(width, _NARROWEST), _WIDEST)


class Tiles:
    """The logits of one batch over this rank's classes, in one buffer that every tile uses in turn.

    Args:
        input: [N, D] in the type of the computation.
        weight: [V, D], of any type.
        bias: [V] or None.
        sample: which classes to take, ascending; None for all.
        inverse_norms: [V]: 1 / length of each row; None if rows are not normalized.
    """

    def __init__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sample: torch.Tensor | None,
        inverse_norms: torch.Tensor | None,
        precision: Precision,
    ) -> None:
        self.input, self._weight, self._bias, self.sample = input, weight, bias, sample
        self._inverse_norms, self.precision = inverse_norms, precision
        self.columns = len(weight) if sample is None else len(sample)
        samples, features = input.shape
        self._width = min(max(self.columns, 1), tile_width(samples, features, input.device))
        self._logits = self.new_buffer()
        self._narrow = None
        if precision.compute != precision.wide:
            self._narrow = input.new_empty(samples * self._width, dtype=precision.compute)
        self._rows = None
        if sample is not None or weight.dtype != precision.compute:
            self._rows = input.new_empty((self._width, features), dtype=precision.compute)

    def __len__(self) -> int:
        return (self.columns + self._width - 1) // self._width

    def __iter__(self) -> Iterator[Tile]:
        starts = range(0, self.columns, self._width)
        for columns in loop_slices([slice(begin, min(begin + self._width, self.columns)) for begin in starts]):
            rows = columns if self.sample is None else self.sample[columns]
            yield Tile(columns.start // self._width, columns.start, columns.stop, rows)

    def new_scratch(self) -> torch.Tensor:
        """Room for a gradient of one tile's rows: [width, D]."""
        return self.input.new_empty((self._width, self.input.size(1)), dtype=self.precision.wide)

    def weight(self, tile: Tile) -> torch.Tensor:
        """[width, D], in the type of the computation. It is valid until the next tile's is read."""
        rows = self._weight[tile.rows]
        return rows if self._rows is None else self._rows[: tile.width].copy_(rows)

    def new_buffer(self) -> torch.Tensor:
        """Room for a number for each of a tile's logits, flat."""
        return self.input.new_empty(len(self.input) * self._width, dtype=self.precision.wide)

    def as_tile(self, buffer: torch.Tensor, tile: Tile) -> torch.Tensor:
        """[N, width]: of a `new_buffer`."""
        return buffer[: len(self.input) * tile.width].view(-1, tile.width)

    def buffer(self, tile: Tile) -> torch.Tensor:
        """[N, width]: the room of a tile's logits."""
        return self.as_tile(self._logits, tile)

    def logits(self, tile: Tile, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[N, width], without softcap and margins, written to `out`; None: to the tiles' one buffer."""
        logits = self.multiply(self.input, weight.t(), self.buffer(tile) if out is None else out)
        if self._inverse_norms is not None:
            logits.mul_(self._inverse_norms[tile.rows])
        if self._bias is not None:
            logits.add_(self._bias[tile.rows])
        return logits

    def inverse_norms(self, tile: Tile) -> torch.Tensor | None:
        return None if self._inverse_norms is None else self._inverse_norms[tile.rows]

    def note_norms(self, tile: Tile, weight: torch.Tensor) -> None:
        """Fills in the norms of a tile's rows, if rows are normalized."""
        if self._inverse_norms is not None:
            norms = torch.linalg.vector_norm(weight, dim=1, dtype=self.precision.wide)
            self._inverse_norms[tile.rows] = norms.clamp_(min=_SMALLEST_NORM).reciprocal_()

    def narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tile, in the type of the computation."""
        if self._narrow is None:
            return tensor
        return self._narrow[: tensor.numel()].view(tensor.shape).copy_(tensor)

    def multiply(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The product of two matrices of the computation's type, summed and written in the wide type."""
        if left.dtype == out.dtype:
            return torch.mm(left, right, out=out)
        if left.device.type == "cpu":  # it has no product with inputs narrower than its output
            return out.copy_(torch.mm(left, right))
        return torch.mm(left, right, out_dtype=out.dtype, out=out)  # a GPU's own: narrow in, fp32 out

    def add_product(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float = 1.0) -> None:
        """total = beta * total + left @ right, in place, in the wide type."""
        if left.dtype == total.dtype:
            total.addmm_(left, right, beta=beta)
        elif left.device.type == "cpu":
            total.mul_(beta).add_(torch.mm(left, right))
        else:
            total.mul_(beta).add_(torch.mm(left, right, out_dtype=total.dtype))


class Columns:
    """Where each sample's target is among the columns of this rank.

    Everything here is of a fixed shape, so that a GPU never has to be waited for.

    Args:
        targets: [N], numbered over all ranks.
        ignore_index: of targets that do not count.
        start, width: this rank's first class, and how many it has.
        sample: those of them that are computed, ascending, including all targets of this rank.
    """

    def __init__(
        self, targets: torch.Tensor, ignore_index: int, start: int, width: int, sample: torch.Tensor | None
    ) -> None:
        local, self.is_local = local_columns(targets, ignore_index, start, width)
        self._columns = local if sample is None else torch.searchsorted(sample, local)

    def inside(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, 1]: a column of the tile, the target's if it is inside; and [N, 1]: whether it is."""
        columns = self._columns - tile.begin
        inside = self.is_local & (columns >= 0) & (columns < tile.width)
        return columns.where(inside, 0)[:, None], inside[:, None]


def head_tiles(
    features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, normalize: bool, scale: float
) -> Tiles:
    """The tiles of this rank's classes for an input [*, D]. They have no gradients.

    Raises:
        ValueError: the input has another width.
    """
    check_width(features, weight)
    precision = Precision.choose(features, autocast_dtype(features))
    flat = features.detach().reshape(-1, features.size(-1)).to(precision.wide)
    flat = (F.normalize(flat, dim=1) if normalize else flat) * scale
    local, local_bias = to_local(weight).detach(), None if bias is None else to_local(bias).detach()
    norms = flat.new_empty(len(local), dtype=precision.wide) if normalize else None
    return Tiles(flat.to(precision.compute), local, local_bias, None, norms, precision)


def check_width(features: torch.Tensor, weight: torch.Tensor) -> None:
    if features.ndim < 1 or features.size(-1) != weight.size(1):
        raise ValueError(
            f"an input {list(features.shape)} was given to a head of {weight.size(1)} features: expected "
            f"[*, {weight.size(1)}]"
        )


def largest_logits(
    tiles: Tiles, k: int, start: int, group: dist.ProcessGroup | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, k] logits, capped, largest first; and [N, k] their classes, counted over all ranks.

    Args:
        k: at most the classes of all ranks.
        start: this rank's first class.
    """
    samples = len(tiles.input)
    best = tiles.input.new_full((samples, k), -torch.inf, dtype=tiles.precision.wide)
    classes = torch.zeros((samples, k), dtype=torch.long, device=best.device)
    for tile in tiles:
        weight = tiles.weight(tile)
        tiles.note_norms(tile, weight)
        logits = tiles.logits(tile, weight)
        logits = logits if softcap is None else cap(logits, softcap)
        values, columns = logits.topk(min(k, tile.width), dim=1)
        best, classes = _merge(torch.cat([best, values], 1), torch.cat([classes, columns + (start + tile.begin)], 1), k)
    if group is not None and group.size() > 1:
        best = primitives.gather_flat(best, group).transpose(0, 1).flatten(1)
        classes = primitives.gather_flat(classes, group).transpose(0, 1).flatten(1)
        best, classes = _merge(best, classes, k)
    return best, classes


def _merge(values: torch.Tensor, classes: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    best, places = values.topk(k, dim=1)
    return best, classes.gather(1, places)
