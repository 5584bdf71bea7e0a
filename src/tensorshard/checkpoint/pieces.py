"""A tensor in pieces that torch's placements cannot describe, in the form that torch's checkpoints take.

A packed weight (query, key and value in one) that is cut over tensor-parallel ranks has several pieces on each rank,
and each piece is cut again over the data ranks. torch's planner takes any object that says where its pieces belong.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from tensorshard.torch_private.dtensor import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class TensorPieces:
    """Views of local memory, and where each belongs in the whole tensor.

    Args:
        shape: of the whole tensor.
        dtype: of its elements.
        pieces: offset of each piece's first element in the whole, and the piece.
    """

    shape: torch.Size
    dtype: torch.dtype
    pieces: list[tuple[torch.Size, torch.Tensor]]

    @classmethod
    def of(
        cls, tensor: torch.Tensor, shape: torch.Size, cuts: Mapping[int, Sequence[tuple[int, int]]]
    ) -> "TensorPieces":
        """The pieces of `tensor`, which has of the full tensor's dimensions what `cuts` says.

        Args:
            tensor: plain, or a DTensor that is cut along its first dimension.
            shape: of the whole.
            cuts: dimension to the ranges (start, length) of the full tensor's that `tensor` consists of.
        """
        offset = [0] * len(shape)  # in the part of all data ranks
        local = tensor
        if isinstance(tensor, DTensor):
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            local, offset[0] = tensor.to_local(), offsets[0]
        pieces = [(offset, local)]
        for dim, ranges in cuts.items():
            pieces = [part for offset, piece in pieces for part in _cut(piece, offset, dim, ranges)]
        return cls(shape, tensor.dtype, [(torch.Size(offset), piece) for offset, piece in pieces if piece.numel()])

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=piece.size()),
                    properties=properties,
                    size=self.shape,
                ),
            )
            for offset, piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offset, sizes=piece.size()) for offset, piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offset, piece in self.pieces:
            if offset == index.offset:
                return piece
        raise KeyError(f"{index.fqn} has no piece at {index.offset} on this rank")


def _cut(
    piece: torch.Tensor, offset: list[int], dim: int, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """The pieces of `piece` along `dim` that are together in the whole, each with its offset there."""
    first, position = offset[dim], 0
    for start, length in ranges:
        low, high = max(position, first), min(position + length, first + piece.size(dim))
        if low < high:
            there = [*offset[:dim], start + low - position, *offset[dim + 1 :]]
            yield there, piece.narrow(dim, low - first, high - low)
        position += length


class PiecesSavePlanner(DefaultSavePlanner):
    """torch's save planner, which also takes tensors in pieces."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict.get(index.fqn)
        return value.__get_tensor_shard__(index) if isinstance(value, TensorPieces) else super().lookup_object(index)


class PiecesLoadPlanner(DefaultLoadPlanner):
    """torch's load planner, which also takes tensors in pieces."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        pieces = {key: value for key, value in state_dict.items() if isinstance(value, TensorPieces)}
        tensors = {key: value for key, value in state_dict.items() if key not in pieces}
        super().set_up_planner(tensors, metadata, is_coordinator)
        self.state_dict = {**self.state_dict, **pieces}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value = self.state_dict.get(index.fqn)
        return value.__get_tensor_shard__(index) if isinstance(value, TensorPieces) else super().lookup_tensor(index)
