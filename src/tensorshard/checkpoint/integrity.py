"""Whether a checkpoint is whole, cheaply or byte for byte: what it holds, and checksums of whole tensors.

A checksum does not depend on how its tensor is laid out. Each rank sums over the elements that it holds; an element's
term is a hash of its bits and of its place in the whole.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.checkpoint.pieces import TensorPieces
from tensorshard.common.stores import local_or_url
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.weights.files.checkpoint_files import OpenCheckpoint, open_checkpoint
from tensorshard.weights.files.manifest import CheckedFile, DamagedCheckpointError

__all__ = ["DamagedCheckpointError", "check", "is_whole", "why_not_whole"]
_ELEMENTS = 1 << 20  # hashed at once, each in 8 bytes
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd, of splitmix64


def why_not_whole(path: Any) -> str | None:
    """What is wrong with the checkpoint at `path`, a folder or a URL, as far as is seen without reading its tensors.

    Returns:
        None if the manifest and ``engine.json`` are as they were written, and all files are there with their sizes;
        else a sentence that names the first file that is not.
    """
    try:
        open_checkpoint(local_or_url(path))
    except (ValueError, OSError, KeyError) as error:
        return str(error)
    return None


def is_whole(path: Any) -> bool:
    """Whether `path` is a whole checkpoint, as far as is seen without reading its tensors."""
    return why_not_whole(path) is None


def check(path: Any) -> OpenCheckpoint:
    """Reads every byte of the checkpoint at `path`, a folder or a URL, and compares it with the manifest.

    Checkpoints of format 1 have no checksums: of them, only the sizes are checked.

    Returns:
        What the checkpoint says about itself.

    Raises:
        FileNotFoundError: it is not a checkpoint.
        DamagedCheckpointError: a file is missing, cut off or changed; the message names it.
    """
    place: Path | str = local_or_url(path)
    checkpoint = open_checkpoint(place)
    if checkpoint.manifest is not None:
        for name, entry in checkpoint.manifest.files.items():
            with CheckedFile(checkpoint.store, name, entry) as file:
                file.check()
    return checkpoint


def checksums(sharded: ShardedModel, dtypes: Mapping[str, torch.dtype], group: dist.ProcessGroup) -> dict[str, str]:
    """Checksums of the master weights with the names of `dtypes`, in these types. A collective of `group`, all ranks.

    A value that its type here cannot hold exactly changes the checksum.
    """
    masters = sharded.masters()
    own = {
        name: {str(tuple(offset)): _sum(piece, offset, shape, dtype) for offset, piece in pieces}
        for name, dtype in dtypes.items()
        if name in masters
        for shape, pieces in [_pieces(sharded, name, masters[name].detach())]
    }
    everyone: list[Any] = [own]
    if group.size() > 1:
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, own, group=group)
    merged: dict[str, dict[str, int]] = {name: {} for name in dtypes}
    for theirs in everyone:
        for name, sums in theirs.items():
            merged[name].update(sums)  # the ranks that have copies of a piece have the same sum
    return {name: f"{sum(sums.values()) % 2**64:016x}" for name, sums in merged.items()}


def _pieces(
    sharded: ShardedModel, name: str, tensor: torch.Tensor
) -> tuple[torch.Size, list[tuple[torch.Size, torch.Tensor]]]:
    """The whole's shape, and this rank's pieces with their offsets in it."""
    shape = sharded.split.full_shape(name, tensor.shape)
    return shape, TensorPieces.of(tensor, shape, sharded.split.cuts(name)).pieces


@torch.no_grad()
def _sum(piece: torch.Tensor, offset: torch.Size, shape: torch.Size, dtype: torch.dtype) -> int:
    total = 0
    for start, rows in _rows(piece):
        places = torch.zeros((), dtype=torch.int64, device=piece.device)
        for dim, length in enumerate(rows.shape):
            first = offset[dim] + (start if dim == 0 else 0)
            along = torch.arange(first, first + length, dtype=torch.int64, device=piece.device)
            along = along * math.prod(shape[dim + 1 :])
            places = places + along.view([-1] + [1] * (rows.dim() - dim - 1))
        values = rows.to(dtype)
        lost = 0 if values.dtype == rows.dtype else int((values.to(rows.dtype) != rows).sum())
        values = torch.view_as_real(values) if values.is_complex() else values.unsqueeze(-1)
        bits = values.contiguous().view(_BITS[values.element_size()]).to(torch.int64)
        mixed = (bits + 1) * _MULTIPLIERS[0] + (places.unsqueeze(-1) + 1) * _MULTIPLIERS[1]
        mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIERS[2]
        total += int((mixed ^ (mixed >> 32)).sum()) + lost
    return total


def _rows(piece: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """A few rows at a time, each with the index of the first."""
    if piece.dim() == 0:
        yield 0, piece
        return
    each = max(1, _ELEMENTS // max(1, piece[:1].numel()))
    for start in range(0, piece.size(0), each):
        yield start, piece[start : start + each]
