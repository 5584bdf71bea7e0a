"""The weights in a checkpoint that tensorshard wrote."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tensorshard.torch_private.messages import reading_in_one_process
from tensorshard.weights.files.safe_reader import SafeReader, read_metadata
from tensorshard.weights.files.weight_file import WeightFile


class CheckpointWeights(WeightFile):
    """The tensors of a checkpoint, each joined from the pieces that the ranks wrote."""

    PREFIXES = ("model.", "buffers.")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / ".metadata")
        self._directory = directory
        stored = read_metadata(directory).state_dict_metadata
        self._keys = {
            key.partition(".")[2]: key
            for key, entry in stored.items()
            if key.startswith(self.PREFIXES) and isinstance(entry, TensorStorageMetadata)
        }
        self._layouts = {name: _on_meta(stored[key]) for name, key in self._keys.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        room = torch.empty_like(self._layouts[name], device="cpu")
        with reading_in_one_process():
            dcp.load({self._keys[name]: room}, storage_reader=SafeReader(self._directory), no_dist=True)
        return room

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def layout(self, name: str) -> torch.Tensor:
        return self._layouts[name]


def _on_meta(entry: Any) -> torch.Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
