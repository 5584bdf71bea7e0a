"""Reads torch's distributed checkpoints, of which only the metadata is unpickled; also as a file of weights.

:class:`StoredWeights` and its like say where files store the values of a model's tensors.
"""

import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tensorshard.torch_private.messages import reading_in_one_process


class WeightFile(ABC, Mapping[str, torch.Tensor]):
    """The tensors of one file, by name. Each is read when it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def layout(self, name: str) -> torch.Tensor:
        """The tensor `name` on the meta device: its shape and dtype."""


@dataclass
class StoredWeights:
    """Where the values of a model's tensors are stored.

    Attributes:
        files: all files.
        made_of: for each of the model's names that the files have, a function that reads its tensor.
        unused: names in the files that the model has no place for.
    """

    files: list[WeightFile]
    made_of: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    layouts: dict[str, torch.Tensor] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def describe(self) -> list[tuple[str, int]]:
        """Names and sizes of the files. They are equal on ranks that read the same files."""
        return [(file.path.name, file.path.stat().st_size) for file in self.files]


def is_of_transformers(module: nn.Module) -> bool:
    """Whether `module` is a model of Hugging Face's transformers, or derived from one."""
    return any(base.__module__.startswith("transformers.") for base in type(module).__mro__)


# unpickling could otherwise run any code that a stranger put into the file.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
_DTYPES = {
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "uint16", "uint32", "uint64",
}  # fmt: skip


class SafeReader(FileSystemReader):
    """A FileSystemReader that refuses metadata with classes that metadata does not need."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if getattr(metadata, "storage_meta", None) is None:
            from torch.distributed.checkpoint.metadata import StorageMeta

            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """The metadata of the checkpoint in `folder`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or names a class that no checkpoint needs.
    """
    file = folder / ".metadata"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not a checkpoint: it has no file .metadata")
    try:
        metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{file} holds a {type(metadata).__name__}, not a checkpoint's metadata")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise ValueError(
            f"the checkpoint's metadata names {module}.{name}, which no checkpoint of tensors needs; it was not "
            f"opened, because such a file could run code"
        )


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


def read_tensors(directory: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint `directory` whose keys begin with `prefix`, whole, by the rest of their keys."""
    stored = read_metadata(directory).state_dict_metadata
    room = {
        key: torch.empty_like(_on_meta(entry), device="cpu")
        for key, entry in stored.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    if room:
        with reading_in_one_process():
            dcp.load(dict(room), storage_reader=SafeReader(directory), no_dist=True)
    return {key.removeprefix(prefix): value for key, value in room.items()}


def _on_meta(entry: Any) -> torch.Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
