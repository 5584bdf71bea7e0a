"""Reads torch's distributed checkpoints. It unpickles only their metadata."""

import io
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

# All classes that the metadata of a checkpoint of tensors needs. A pickle that names another is refused, since
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
