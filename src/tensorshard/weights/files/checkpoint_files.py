"""Reads the tensors of checkpoints, by torch's planner for any layout; also as a file of weights.

Checkpoints of format 2 have a manifest, and are checked as they are read. Those of format 1 are torch's distributed
checkpoints, of which only the metadata is unpickled.
"""

import io
import json
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tensorshard.common.stores import LocalStore, Store, open_store
from tensorshard.common.words import kind_of
from tensorshard.weights.files.manifest import (
    DTYPES,
    MANIFEST,
    CheckedFile,
    DamagedCheckpointError,
    Manifest,
    PieceEntry,
    as_bytes,
    box,
    check_sizes,
    read_checked,
    read_manifest,
)
from tensorshard.weights.files.stored_weights import WeightFile

_DOCUMENT = "engine.json"
_BLOCK = 8 << 20  # bytes that are read before they are copied, where they are not read to where they belong


# Unpickling could otherwise run any code that a stranger put into the file.
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
        raise ValueError(f"{file} holds {kind_of(metadata)}, not a checkpoint's metadata")
    return metadata


class _Unused:
    """Stands for the plans of ranks, which Megatron-Core keeps in the metadata. They are not needed."""

    def __init__(self, *_: Any) -> None: ...


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing.strategies.torch"):
            return _Unused
        if module == "pathlib._local":  # as Python 3.13 calls it
            module = "pathlib"
        if (module, name) in _ALLOWED or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise ValueError(
            f"the checkpoint's metadata names {module}.{name}, which no checkpoint of tensors needs; it was not "
            f"opened, because such a file could run code"
        )


class TensorReader(StorageReader):
    """Reads tensors for torch's planner. A subclass says how.

    Args:
        metadata: of all tensors.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def read_items(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Reads what `items` ask for into the tensors that the `planner` names."""
        raise NotImplementedError

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between reads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All that is needed is in the metadata."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.read_items(plan.items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class ManifestReader(TensorReader):
    """Reads tensors that a manifest describes; what is read is checked."""

    def __init__(self, store: Store, manifest: Manifest, metadata: Metadata) -> None:
        super().__init__(metadata)
        self._store = store
        self._manifest = manifest

    def read_items(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        pieces: dict[str, list[tuple[PieceEntry, ReadItem]]] = {}
        for item in items:
            piece = self._metadata.storage_data[item.storage_index]
            pieces.setdefault(piece.file, []).append((piece, item))
        for file, of_file in pieces.items():
            with CheckedFile(self._store, file, self._manifest.files[file]) as stream:
                for piece, item in sorted(of_file, key=lambda pair: pair[0].start):  # each chunk is read once
                    target = planner.resolve_tensor(item).detach()
                    _read_box(stream, piece, self._manifest.tensors[item.storage_index.fqn].torch_dtype, item, target)
                    planner.commit_tensor(item, target)


def _read_box(stream: CheckedFile, piece: PieceEntry, dtype: torch.dtype, item: ReadItem, target: torch.Tensor) -> None:
    """Reads the part of a stored `piece` that `item` asks for into `target`."""
    row = math.prod(piece.sizes[1:]) * dtype.itemsize
    first, count = (int(item.storage_offsets[0]), int(item.lengths[0])) if piece.sizes else (0, 1)
    whole_rows = tuple(item.lengths[1:]) == piece.sizes[1:]
    if whole_rows and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
        stream.read_into(piece.start + first * row, as_bytes(target))
        return
    others = box(item.storage_offsets[1:], item.lengths[1:])
    rows_of_target = target if piece.sizes else target.unsqueeze(0)
    for start in range(0, count, rows := max(1, _BLOCK // max(row, 1))):
        block = torch.empty((min(rows, count - start), *piece.sizes[1:]), dtype=dtype)
        stream.read_into(piece.start + (first + start) * row, as_bytes(block))
        rows_of_target[start : start + len(block)].copy_(block[(slice(None), *others)])


def _metadata_of(manifest: Manifest) -> Metadata:
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=entry.torch_dtype),
            size=torch.Size(entry.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=torch.Size(piece.sizes))
                for piece in entry.pieces
            ],
        )
        for name, entry in manifest.tensors.items()
    }
    places = {
        MetadataIndex(name, torch.Size(piece.offset)): piece
        for name, entry in manifest.tensors.items()
        for piece in entry.pieces
    }
    return Metadata(state_dict_metadata=entries, storage_data=places)


@dataclass(frozen=True)
class OpenCheckpoint:
    """What a checkpoint says about itself, and what reads its tensors.

    Args:
        store: its folder.
        document: its ``engine.json``.
        metadata: of its tensors.
        manifest: None in a checkpoint of format 1, which has no checksums.
    """

    store: Store
    document: dict[str, Any]
    metadata: Metadata
    manifest: Manifest | None

    def reader(self) -> StorageReader:
        """What reads its tensors."""
        if self.manifest is None:
            assert isinstance(self.store, LocalStore)
            return SafeReader(self.store.path)
        return ManifestReader(self.store, self.manifest, self.metadata)

    def renamed(self, names: Mapping[str, str]) -> "OpenCheckpoint":
        """The same tensors by other names: `names` has the new one of each, and lacks those that are left out."""
        assert self.manifest is not None  # format 1 is of no other program
        tensors = {names[name]: entry for name, entry in self.manifest.tensors.items() if name in names}
        manifest = replace(self.manifest, tensors=tensors)
        return replace(self, manifest=manifest, metadata=_metadata_of(manifest))


def _what_is_there(store: Store) -> str:
    """Why a place without a checkpoint's documents is none."""
    if isinstance(store, LocalStore) and not store.path.exists():
        return "there is no such folder"
    if isinstance(store, LocalStore) and not store.path.is_dir():
        return "it is a file, and a checkpoint is the folder that engine.save wrote"
    return f"it has no file {_DOCUMENT}"


def open_checkpoint(path: Path | str) -> OpenCheckpoint:
    """Reads what the checkpoint at `path`, a folder or a URL, says about itself.

    Raises:
        FileNotFoundError: it is not a checkpoint, or not a whole one.
        DamagedCheckpointError: a file of it is missing or cut off, or one that was read is damaged.
        ValueError: it is of a version that this one does not read.
    """
    store = open_store(path)
    manifest = read_manifest(store)
    if manifest is not None:
        check_sizes(store, {name: entry.size for name, entry in manifest.files.items()})
        document = json.loads(read_checked(store, manifest, manifest.document))
        return OpenCheckpoint(store, document, _metadata_of(manifest), manifest)
    if store.size(_DOCUMENT) is None:
        raise FileNotFoundError(f"{path} is not a checkpoint of tensorshard: {_what_is_there(store)}")
    try:
        document = json.loads(store.read(_DOCUMENT).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{store.path_of(_DOCUMENT)} is damaged: it is not UTF-8: {error}") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{store.path_of(_DOCUMENT)} is damaged: {error}") from error
    if document.get("format") == 2:
        raise DamagedCheckpointError(
            f"{store.path_of(MANIFEST)} is missing, so {path} was not written to its end; load an older checkpoint"
        )
    if document.get("format") != 1:
        raise ValueError(f"{path} has format {document.get('format')!r}; this version reads formats 1 and 2")
    if not isinstance(store, LocalStore):
        raise ValueError(f"{path} is a checkpoint of format 1, which is read from a disk alone; copy it to one")
    metadata = read_metadata(store.path)
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    check_sizes(store, ends, at_least=True)
    return OpenCheckpoint(store, document, metadata, None)


class CheckpointWeights(WeightFile):
    """The tensors of a checkpoint, each joined from the pieces that the ranks wrote.

    Args:
        partial: whether it may have the trained parameters alone.
    """

    PREFIXES = ("model.", "buffers.")

    def __init__(self, place: Path | str | OpenCheckpoint, *, partial: bool = False) -> None:
        self.checkpoint = place if isinstance(place, OpenCheckpoint) else open_checkpoint(place)
        self._file = MANIFEST if self.checkpoint.manifest is not None else ".metadata"
        super().__init__(self.checkpoint.store.path_of(self._file))
        if self.checkpoint.document.get("base") and not partial:
            raise ValueError(
                f"{place} has the trained parameters alone (engine.save(trained_only=True)), not the "
                f"{len(self.checkpoint.document['base'])} frozen ones: build the engine from the weights that it was "
                f"trained from, and call engine.load, then engine.save or engine.save_pretrained"
            )
        stored = self.checkpoint.metadata.state_dict_metadata
        self._keys = {
            key.partition(".")[2]: key
            for key, entry in stored.items()
            if key.startswith(self.PREFIXES) and isinstance(entry, TensorStorageMetadata)
        }
        self._layouts = {name: _on_meta(stored[key]) for name, key in self._keys.items()}

    @property
    def size(self) -> int:
        return self.checkpoint.store.size(self._file) or 0

    @property
    def document(self) -> dict[str, Any]:
        """The checkpoint's ``engine.json``."""
        return self.checkpoint.document

    def __getitem__(self, name: str) -> torch.Tensor:
        room = torch.empty_like(self._layouts[name], device="cpu")
        read_into(self.checkpoint, {self._keys[name]: room})
        return room

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def layout(self, name: str) -> torch.Tensor:
        return self._layouts[name]


def read_tensors(directory: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint `directory` whose keys begin with `prefix`, whole, by the rest of their keys."""
    checkpoint = open_checkpoint(directory)
    room = {
        key: torch.empty_like(_on_meta(entry), device="cpu")
        for key, entry in checkpoint.metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    if room:
        read_into(checkpoint, dict(room))
    return {key.removeprefix(prefix): value for key, value in room.items()}


def read_into(checkpoint: OpenCheckpoint, tensors: dict[str, Any], planner: LoadPlanner | None = None) -> None:
    """Fills `tensors`, by their names in the checkpoint, with what this process holds of each.

    No collective: what is read follows from what is asked for, so that no rank waits for the plans of all.

    Args:
        planner: torch's, or one that takes further kinds of tensors; it is used once.

    Raises:
        DamagedCheckpointError: a file is damaged.
    """
    planner = planner or DefaultLoadPlanner()
    reader = checkpoint.reader()
    planner.set_up_planner(tensors, checkpoint.metadata, is_coordinator=False)
    reader.set_up_storage_reader(checkpoint.metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _on_meta(entry: Any) -> torch.Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
