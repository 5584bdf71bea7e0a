"""A tensor in pieces that torch's placements cannot describe, in the form that torch's checkpoints take.

A packed weight (query, key and value in one) that is cut over tensor-parallel ranks has several pieces on each rank,
and each piece is cut again over the data ranks. torch's planner takes any object that says where its pieces belong.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
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
    def of(cls, tensor: torch.Tensor, shape: torch.Size, dim: int, ranges: list[tuple[int, int]]) -> "TensorPieces":
        """The pieces of `tensor`, whose dimension `dim` consists of `ranges` (start, length) of the full tensor's.

        Args:
            tensor: plain, or a DTensor that is cut along its first dimension.
            shape: of the whole.
        """
        local, first = tensor, 0
        if isinstance(tensor, DTensor):
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            local, first = tensor.to_local(), offsets[0]
        pieces = []
        position = 0  # along `dim` of this tensor-parallel rank's part
        for start, length in ranges:
            offset = [0] * len(shape)
            offset[0] = first
            if dim != 0:
                piece, offset[dim] = local.narrow(dim, position, length), start
            else:
                low = max(position, first)
                high = min(position + length, first + local.size(0))
                piece = local.narrow(0, low - first, max(0, high - low)) if high > low else local.narrow(0, 0, 0)
                offset[0] = start + low - position
            if piece.numel():
                pieces.append((torch.Size(offset), piece))
            position += length
        return cls(shape, tensor.dtype, pieces)

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
