"""Token files: 64 bytes of header, then tokens in the smallest type that holds the vocabulary."""

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

_MAGIC = b"TSTOKENS"
_VERSION = 1
# Little-endian, as are the tokens: magic, version, bytes per token, CRC-32 of the tokens, number of tokens,
# vocabulary size; padded to 64 bytes so that the tokens start on a cache line.
_HEADER = struct.Struct("<8sHHIQQ32x")
_CRC_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class _Header:
    token_bytes: int
    crc32: int
    num_tokens: int
    vocab_size: int

    @property
    def file_bytes(self) -> int:
        return _HEADER.size + self.token_bytes * self.num_tokens

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, self.token_bytes, self.crc32, self.num_tokens, self.vocab_size)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds the tokens ``0`` to ``vocab_size - 1``.

    Raises:
        ValueError: a vocabulary that is empty, or too large for 32 bits.
    """
    for code in ("<u1", "<u2", "<u4"):
        if 1 <= vocab_size <= 1 << 8 * np.dtype(code).itemsize:
            return np.dtype(code)
    raise ValueError(f"vocab_size is {vocab_size}; expected 1 to {1 << 32} (tokens of up to 32 bits).")


def write_token_file(
    path: str | os.PathLike[str], chunks: Iterable[np.ndarray], *, vocab_size: int, overwrite: bool = False
) -> None:
    """Write the tokens of all ``chunks``, one after the other, to ``path``.

    One chunk is held at a time. The file is written under a temporary name beside ``path``, flushed to the
    disk and only then renamed, so that ``path`` is whole or absent (or the old file) at any instant.

    Args:
        path: file to write, in a directory that exists.
        chunks: one-dimensional integer arrays; empty ones are allowed.
        vocab_size: tokens are ``0`` to ``vocab_size - 1``.
        overwrite: whether to replace a file that is already there.

    Raises:
        FileNotFoundError: the directory does not exist.
        FileExistsError: ``path`` exists and ``overwrite`` is False.
        ValueError: tokens outside the vocabulary, an array that is not one, no tokens at all.
    """
    with token_file_writer(path, vocab_size=vocab_size, overwrite=overwrite) as writer:
        for chunk in chunks:
            writer.write(chunk)


@contextmanager
def token_file_writer(
    path: str | os.PathLike[str], *, vocab_size: int, overwrite: bool = False
) -> Iterator["TokenFileWriter"]:
    """As :func:`write_token_file`, for chunks that come one by one, or for several files at once.

    The file exists when the block ends. If the block raises, nothing is written to ``path``.
    """
    path = Path(path)
    token_dtype(vocab_size)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no directory {path.parent}; make it first.")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} is already there; give another name, or overwrite=True to replace it.")
    with _renamed_when_complete(path) as file:
        writer = TokenFileWriter(file, vocab_size)
        yield writer
        if not writer.num_tokens:
            raise ValueError(f"There are no tokens to write to {path}: the chunks are empty or there are none.")
        writer.write_header()


class TokenFileWriter:
    """Takes the chunks of a token file; made by :func:`token_file_writer`.

    Attributes:
        num_tokens: number of tokens written so far.
    """

    def __init__(self, file: BinaryIO, vocab_size: int) -> None:
        self._file = file
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._crc32 = 0
        self._chunks = 0
        self.num_tokens = 0
        file.write(bytes(_HEADER.size))

    def write(self, chunk: np.ndarray) -> None:
        """Adds the tokens of a one-dimensional integer array.

        Raises:
            ValueError: tokens outside the vocabulary, or not a one-dimensional integer array.
        """
        _check_chunk(chunk, self._chunks, self._vocab_size)
        payload = chunk.astype(self._dtype).tobytes()
        self._crc32 = zlib.crc32(payload, self._crc32)
        self._file.write(payload)
        self._chunks += 1
        self.num_tokens += chunk.size

    def write_header(self) -> None:
        """Writes the header, at the beginning of the file. This is the last call."""
        self._file.seek(0)
        self._file.write(_Header(self._dtype.itemsize, self._crc32, self.num_tokens, self._vocab_size).pack())


class TokenFile:
    """A token file, opened by memory map: nothing is read until it is used.

    Args:
        path: a file written by ``write_token_file``.

    Attributes:
        tokens: read-only unsigned array ``[num_tokens]``.
        vocab_size: tokens are ``0`` to ``vocab_size - 1``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: not a token file, one of another version, or of another length than its header says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._header = _read_header(self.path)
        self.vocab_size = self._header.vocab_size
        self.tokens: np.ndarray = np.memmap(
            self.path,
            dtype=token_dtype(self.vocab_size),
            mode="r",
            offset=_HEADER.size,
            shape=(self._header.num_tokens,),
        )

    def __len__(self) -> int:
        """Number of tokens."""
        return self._header.num_tokens

    def __reduce__(self) -> tuple[type["TokenFile"], tuple[Path]]:
        # A memory map pickles as a copy of the data; a data loader's worker opens the file instead.
        return TokenFile, (self.path,)

    def verify(self) -> None:
        """Read the whole file and compare its checksum with the one it was written with.

        Raises:
            ValueError: they differ.
        """
        crc32 = 0
        step = _CRC_CHUNK_BYTES // self.tokens.itemsize
        for start in range(0, len(self), step):
            crc32 = zlib.crc32(self.tokens[start : start + step].data, crc32)
        if crc32 != self._header.crc32:
            raise ValueError(
                f"{self.path} is corrupted: its tokens have the CRC-32 {crc32:08x}, "
                f"but were written with {self._header.crc32:08x}. Write the file again."
            )


@contextmanager
def _renamed_when_complete(path: Path) -> Iterator[BinaryIO]:
    """A file to write. It gets the name ``path`` on success, and is removed on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The rename is only safe on the disk once the directory is flushed, too.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _check_chunk(chunk: np.ndarray, number: int, vocab_size: int) -> None:
    if not isinstance(chunk, np.ndarray) or chunk.ndim != 1 or not np.issubdtype(chunk.dtype, np.integer):
        got = f"{chunk.dtype}{list(chunk.shape)}" if isinstance(chunk, np.ndarray) else type(chunk).__name__
        raise ValueError(f"Chunk {number} is {got}; expected a one-dimensional array of integers.")
    if chunk.size and not 0 <= chunk.min() <= chunk.max() < vocab_size:
        raise ValueError(
            f"Chunk {number} holds tokens from {chunk.min()} to {chunk.max()}; "
            f"with vocab_size {vocab_size} they must be 0 to {vocab_size - 1}."
        )


def _read_header(path: Path) -> _Header:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no token file {path}; `tensorshard data tokenize TEXT...` writes them, and so does "
            f"tensorshard.data.write_token_file."
        )
    with open(path, "rb") as file:
        packed = file.read(_HEADER.size)
        found_bytes = os.fstat(file.fileno()).st_size
    if len(packed) < _HEADER.size or not packed.startswith(_MAGIC):
        raise ValueError(
            f"{path} is not a token file: expected {_HEADER.size} bytes of header that begin with "
            f"{_MAGIC!r}, found {found_bytes} bytes that begin with {packed[: len(_MAGIC)]!r}. "
            "Token files are made by write_token_file."
        )
    _, version, token_bytes, crc32, num_tokens, vocab_size = _HEADER.unpack(packed)
    if version != _VERSION:
        raise ValueError(f"{path} is a token file of version {version}; this release reads version {_VERSION}.")
    header = _Header(token_bytes, crc32, num_tokens, vocab_size)
    if token_bytes != token_dtype(vocab_size).itemsize or num_tokens == 0:
        raise ValueError(
            f"{path} has a damaged header: {num_tokens} tokens of {token_bytes} bytes "
            f"for a vocabulary of {vocab_size}. Write the file again."
        )
    if found_bytes != header.file_bytes:
        what = "truncated" if found_bytes < header.file_bytes else "followed by foreign bytes"
        raise ValueError(
            f"{path} is {what}: expected {header.file_bytes} bytes for {num_tokens} tokens, "
            f"found {found_bytes}. Write the file again."
        )
    return header
