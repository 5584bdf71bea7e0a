"""Token files: arrays in numpy's ``.npy`` format, of the smallest type for the vocabulary, with a JSON beside."""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tensorshard.common.stores import fetched, local_or_url, open_store

_CRC_CHUNK_BYTES = 1 << 24


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
    disk and only then renamed, so that ``path`` is whole or absent (or the old file) at any instant. It is an array
    that ``numpy.load`` reads. The vocabulary's size and the tokens' CRC-32 are in a small JSON file beside it, such as
    ``train.json`` for ``train.npy``.

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
        beside = writer.finish()
        with _renamed_when_complete(_beside(path)) as described:
            described.write(json.dumps(beside).encode())


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
        self._write_header()

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

    def finish(self) -> dict[str, int]:
        """Writes the header of the whole file. This is the last call. Returns what the JSON beside holds."""
        self._file.seek(0)
        self._write_header()
        return {"vocab_size": self._vocab_size, "num_tokens": self.num_tokens, "crc32": self._crc32}

    def _write_header(self) -> None:
        """Its length does not depend on the number of tokens, as numpy leaves room for a longer first dimension."""
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.num_tokens,)}
        np.lib.format.write_array_header_1_0(self._file, described)


class TokenFile:
    """A file of tokens, opened by memory map: nothing is read until it is used.

    Args:
        path: a file written by ``write_token_file``, or any one-dimensional array of integers in a ``.npy`` file; or a
            URL of one that fsspec knows, such as ``s3://bucket/train.npy``, which is copied to the folder of caches
            (``~/.cache/tensorshard``) first, once per machine.

    Attributes:
        tokens: read-only array of integers ``[num_tokens]``.
        vocab_size: tokens are ``0`` to ``vocab_size - 1``; None if there is no JSON beside the file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: no such array, a file that is cut off, or a JSON beside it that is of another file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _on_this_machine(path).absolute()
        self.tokens = _open(self.path)
        self._described = _described(self.path, len(self.tokens))
        self.vocab_size: int | None = self._described.get("vocab_size")

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def __reduce__(self) -> tuple[type["TokenFile"], tuple[Path]]:
        # A memory map pickles as a copy of the data; a data loader's worker opens the file instead.
        return TokenFile, (self.path,)

    def verify(self) -> None:
        """Read the whole file and compare its checksum with the one it was written with.

        Raises:
            ValueError: they differ, or there is no JSON beside the file.
        """
        written = self._described.get("crc32")
        if written is None:
            raise ValueError(f"{_beside(self.path)} is not there, which holds the checksum of {self.path.name}.")
        crc32 = 0
        step = _CRC_CHUNK_BYTES // self.tokens.itemsize
        for start in range(0, len(self), step):
            crc32 = zlib.crc32(self.tokens[start : start + step].data, crc32)
        if crc32 != written:
            raise ValueError(
                f"{self.path} is corrupted: its tokens have the CRC-32 {crc32:08x}, "
                f"but were written with {written:08x}. Write the file again."
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


def _beside(path: Path) -> Path:
    """The JSON file that describes the token file `path`."""
    return path.with_suffix(".json") if path.suffix == ".npy" else path.with_name(f"{path.name}.json")


def _on_this_machine(path: str | os.PathLike[str]) -> Path:
    """`path`, or that of a copy of the file at a URL, beside which its JSON file is copied, too."""
    place = local_or_url(path)
    if isinstance(place, Path):
        return place
    folder, _, name = place.rpartition("/")
    if open_store(folder).size(name) is None:
        raise FileNotFoundError(f"there is no token file {place}")
    names = (name, _beside(Path(name)).name)
    return fetched(folder, {name: name for name in names}) / name


def _open(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no token file {path}; `tensorshard data tokenize TEXT...` writes them, and so does "
            f"tensorshard.data.write_token_file."
        )
    with open(path, "rb") as file:
        begins = file.read(len(np.lib.format.MAGIC_PREFIX))
    size = path.stat().st_size
    if begins != np.lib.format.MAGIC_PREFIX:
        raise ValueError(
            f"{path} is not a token file: expected an array of numpy's .npy format, found {size} bytes that begin with "
            f"{begins!r}. Token files are made by write_token_file, and by `tensorshard data tokenize`."
        )
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}; it has {size} bytes). Write it again.") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"{path} holds {tokens.dtype}{list(tokens.shape)}; expected a one-dimensional array of integers."
        )
    if tokens.offset + tokens.nbytes != size:
        raise ValueError(f"{path} is followed by foreign bytes: its {len(tokens)} tokens end before its {size} bytes.")
    return tokens


def _described(path: Path, num_tokens: int) -> dict[str, int]:
    """What the JSON beside a token file says; nothing if there is none."""
    beside = _beside(path)
    if not beside.is_file():
        return {}
    try:
        described = json.loads(beside.read_text())
        counted = described["num_tokens"]
        known = {name: int(described[name]) for name in ("vocab_size", "crc32")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{beside} does not describe a token file ({error!r}). Write {path.name} again.") from error
    if counted != num_tokens:
        raise ValueError(
            f"{beside} is of a file of {counted} tokens, and {path.name} has {num_tokens}. Write it again."
        )
    return known
