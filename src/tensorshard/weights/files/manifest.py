"""The manifest of a checkpoint: which files it consists of, where in them its tensors are, and checksums of all bytes.

It is written last, so a folder that has it was written to its end. Files are checked in chunks, so that a rank that
reads a part of a file checks that part. The checksum is CRC-32: it finds every flipped bit, and every run of damaged
bits of up to 32; zlib computes it at more than 2 GB/s.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch

from tensorshard.common.stores import Store

MANIFEST = "manifest.json"
FORMAT = 2
CHUNK = 4 << 20  # bytes that have one checksum

DTYPES = {
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "uint16", "uint32", "uint64",
}  # fmt: skip
"""The dtypes that checkpoints hold, by their names in torch."""

_END = re.compile(rb',"checksum":"([0-9a-f]{8})"}\n\Z')
_WHAT_TO_DO = "load an older checkpoint, or copy this one again from where it came"


class DamagedCheckpointError(ValueError):
    """A checkpoint is not as it was written: a file is missing, cut off or changed. The message names the file."""


@dataclass(frozen=True)
class FileEntry:
    """A file: its bytes, and the checksum of each chunk of them."""

    size: int
    checksums: list[int]


@dataclass(frozen=True)
class PieceEntry:
    """A box of a tensor, stored in a file as its elements in order.

    Args:
        offset: of its first element in the tensor.
        sizes: its shape.
        file: that holds it.
        start: of its first byte in the file.
    """

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int


@dataclass
class TensorEntry:
    """A tensor: the name of its dtype in torch, its shape, and the pieces that together are all of it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[PieceEntry] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Args:
        document: the name of the file with everything that is not a tensor, ``engine.json``.
        files: by name, all but the manifest.
        tensors: by name.
    """

    document: str
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    def to_bytes(self) -> bytes:
        """The manifest as a file: JSON, which ends with a checksum of what stands before that."""
        document = {
            "format": FORMAT,
            "document": self.document,
            "chunk": CHUNK,
            "files": {name: [entry.size, entry.checksums] for name, entry in self.files.items()},
            "tensors": {
                name: [
                    entry.dtype,
                    list(entry.shape),
                    [[list(p.offset), list(p.sizes), p.file, p.start] for p in entry.pieces],
                ]
                for name, entry in self.tensors.items()
            },
        }
        text = json.dumps(document, separators=(",", ":")).encode()[:-1]
        return text + b',"checksum":"%08x"}\n' % zlib.crc32(text)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Manifest":
        """Reads what :meth:`to_bytes` returned.

        Raises:
            DamagedCheckpointError: it is something else.
            ValueError: it is of a later version.
        """
        end = _END.search(data)
        if end is None or int(end[1], 16) != zlib.crc32(data[: end.start()]):
            raise DamagedCheckpointError(f"{path} is damaged: its bytes are not those that were written; {_WHAT_TO_DO}")
        document = json.loads(data)
        if document["format"] != FORMAT or document["chunk"] != CHUNK:
            raise ValueError(
                f"{path} has format {document['format']!r}; this version of tensorshard reads formats 1 and {FORMAT}"
            )
        files = {name: FileEntry(size, checksums) for name, (size, checksums) in document["files"].items()}
        tensors = {
            name: TensorEntry(
                dtype, tuple(shape), [PieceEntry(tuple(o), tuple(s), file, start) for o, s, file, start in pieces]
            )
            for name, (dtype, shape, pieces) in document["tensors"].items()
        }
        for name, entry in tensors.items():
            if entry.dtype not in DTYPES:
                raise ValueError(f"{path} says that {name} has the dtype {entry.dtype!r}, which no checkpoint has")
        return cls(document["document"], files, tensors)


def read_manifest(store: Store) -> Manifest | None:
    """The manifest of the checkpoint in `store`; None if there is none.

    Raises:
        DamagedCheckpointError: it is damaged.
    """
    try:
        data = store.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Manifest.from_bytes(data, store.path_of(MANIFEST))


class ChecksummedWriter:
    """Writes a file and computes its checksums on the way.

    Args:
        stream: that the bytes go to.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = 0
        self._checksums: list[int] = []
        self._checksum = 0  # of the chunk that is not full yet

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._size

    def write(self, data: memoryview | bytes) -> None:
        """Appends `data`."""
        data = memoryview(data)
        while data:
            part = data[: CHUNK - self._size % CHUNK]
            self._checksum = zlib.crc32(part, self._checksum)
            self._stream.write(part)
            self._size += len(part)
            if self._size % CHUNK == 0:
                self._checksums.append(self._checksum)
                self._checksum = 0
            data = data[len(part) :]

    def entry(self) -> FileEntry:
        """Size and checksums of what was written."""
        last = [self._checksum] if self._size % CHUNK else []
        return FileEntry(self._size, [*self._checksums, *last])


def entry_of(data: bytes) -> FileEntry:
    """Size and checksums of a file that holds `data`."""
    return FileEntry(len(data), [zlib.crc32(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)])


class CheckedFile:
    """Reads parts of a file, and checks each chunk that a part touches. A context manager.

    Args:
        entry: of the file, in the manifest.

    Raises:
        DamagedCheckpointError: the file is missing, cut off or changed.
    """

    def __init__(self, store: Store, file: str, entry: FileEntry) -> None:
        self._path = store.path_of(file)
        self._entry = entry
        try:
            self._stream = store.open(file)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{self._path} is missing; {_WHAT_TO_DO}") from error
        self._index = -1  # of the chunk that was read last
        # Reused, as the first touch of new memory takes longer than the copy; and aligned, as a tensor's memory is.
        self._room = as_bytes(torch.empty(min(CHUNK, entry.size), dtype=torch.uint8))

    def __enter__(self) -> "CheckedFile":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stream.close()

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills `target` with the file's bytes from `start` on."""
        done = 0
        while done < len(target):
            index, within = divmod(start + done, CHUNK)
            length = self._length(index)
            if within == 0 and len(target) - done >= length and index != self._index:
                part = target[done : done + length]
                self._read_chunk(index, part)
            else:
                part = target[done : done + length - within]
                part[:] = self._kept_chunk(index)[within : within + len(part)]
            done += len(part)

    def check(self) -> None:
        """Reads and checks the whole file."""
        for index in range(len(self._entry.checksums)):
            self._kept_chunk(index)
        self._stream.seek(0, 2)
        if self._stream.tell() != self._entry.size:
            raise DamagedCheckpointError(_wrong_size(self._path, self._stream.tell(), self._entry.size))

    def _length(self, index: int) -> int:
        return min(CHUNK, self._entry.size - index * CHUNK)

    def _kept_chunk(self, index: int) -> memoryview:
        if index != self._index:
            self._index = -1
            self._read_chunk(index, self._room[: self._length(index)])
            self._index = index
        return self._room

    def _read_chunk(self, index: int, target: memoryview) -> None:
        first, done = index * CHUNK, 0
        self._stream.seek(first)
        while done < len(target):
            count = self._stream.readinto(target[done:])  # type: ignore[attr-defined]
            if not count:
                raise DamagedCheckpointError(_wrong_size(self._path, first + done, self._entry.size))
            done += count
        if zlib.crc32(target) != self._entry.checksums[index]:
            raise DamagedCheckpointError(
                f"{self._path} is damaged: its bytes {first:,} to {first + done - 1:,} are not those that were "
                f"written; {_WHAT_TO_DO}"
            )


def read_checked(store: Store, manifest: Manifest, file: str) -> bytes:
    """The bytes of a whole `file`, checked.

    Raises:
        DamagedCheckpointError: it is missing, cut off or changed.
    """
    entry = manifest.files[file]
    data = bytearray(entry.size)
    with CheckedFile(store, file, entry) as stream:
        stream.read_into(0, memoryview(data))
        stream.check()
    return bytes(data)


def check_sizes(store: Store, sizes: Mapping[str, int], *, at_least: bool = False) -> None:
    """Whether all files are there with their `sizes`.

    Args:
        at_least: whether a file may be larger.

    Raises:
        DamagedCheckpointError: names the first that is not.
    """
    for file, size in sizes.items():
        actual = store.size(file)
        if actual is None:
            raise DamagedCheckpointError(f"{store.path_of(file)} is missing; {_WHAT_TO_DO}")
        if actual < size or (actual > size and not at_least):
            raise DamagedCheckpointError(_wrong_size(store.path_of(file), actual, size))


def _wrong_size(path: str, actual: int, expected: int) -> str:
    what = "cut off" if actual < expected else "too long"
    return f"{path} is {what}: it has {actual:,} bytes, and {expected:,} were written; {_WHAT_TO_DO}"


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def box(start: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box of a tensor."""
    return tuple(slice(first, first + length) for first, length in zip(start, lengths, strict=True))
