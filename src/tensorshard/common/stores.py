"""Folders of files, on disks and in object stores, behind one small interface.

Object stores are reached through fsspec, which torch brings. They have no rename and no folders: a file there is whole
or absent once it is closed, and a set of files is what one last file says it is.
"""

import os
import re
import shutil
from abc import ABC, abstractmethod
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from tensorshard.common.paths import as_path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_READ_AHEAD = 32 << 20  # bytes that one request to an object store asks for


class Store(ABC):
    """A folder whose files are written once and read by name.

    Attributes:
        name: its path or URL, for messages.
    """

    name: str

    @abstractmethod
    def size(self, file: str) -> int | None:
        """Bytes of `file`; None if it is not there."""

    @abstractmethod
    def create(self, file: str) -> BinaryIO:
        """A stream that writes `file` anew."""

    @abstractmethod
    def open(self, file: str) -> BinaryIO:
        """A stream that reads `file`, and can seek.

        Raises:
            FileNotFoundError: it is not there.
        """

    @abstractmethod
    def files(self) -> list[str]:
        """The names of the files directly in it, sorted; [] if it is not there."""

    @abstractmethod
    def folders(self) -> list[str]:
        """The names of the folders directly in it, sorted; [] if it is not there."""

    @abstractmethod
    def remove(self, file: str) -> None:
        """Removes `file`, if it is there."""

    @abstractmethod
    def remove_all(self) -> None:
        """Removes the folder and all that is in it, if it is there."""

    def path_of(self, file: str) -> str:
        """The whole path or URL of `file`, for messages."""
        return f"{self.name}/{file}"

    def read(self, file: str) -> bytes:
        """The bytes of `file`.

        Raises:
            FileNotFoundError: it is not there.
        """
        with self.open(file) as stream:
            return stream.read()

    def write(self, file: str, data: bytes) -> None:
        """Writes `file`; returns when the disk or the store has it."""
        with self.create(file) as stream:
            stream.write(data)
            sync(stream)


class LocalStore(Store):
    """A folder of this machine's file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def size(self, file: str) -> int | None:
        path = self.path / file
        return path.stat().st_size if path.is_file() else None

    def create(self, file: str) -> BinaryIO:
        return (self.path / file).open("wb")

    def open(self, file: str) -> BinaryIO:
        return (self.path / file).open("rb")

    def files(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir() if entry.is_file()) if self.path.is_dir() else []

    def folders(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir() if entry.is_dir()) if self.path.is_dir() else []

    def remove(self, file: str) -> None:
        (self.path / file).unlink(missing_ok=True)

    def remove_all(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class RemoteStore(Store):
    """A folder of an object store, or of whatever else fsspec knows by its URL.

    Raises:
        ImportError: what fsspec needs for this protocol is not installed.
        ValueError: fsspec does not know the protocol.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.name = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            self._files, root = fsspec.core.url_to_fs(self.name)
        except ImportError as error:
            raise ImportError(
                f"{url} was given, and what reads {protocol}:// is not installed: {error}; for s3:// it is "
                f"`pip install 'tensorshard[s3]'`"
            ) from error
        except ValueError as error:
            raise ValueError(f"{url} was given: {error}; local paths have no protocol") from error
        self._root = root.rstrip("/")

    def _place(self, file: str) -> str:
        return f"{self._root}/{file}"

    def size(self, file: str) -> int | None:
        self._files.invalidate_cache(self._root)
        try:
            return int(self._files.size(self._place(file)))
        except FileNotFoundError:
            return None

    def version(self, file: str) -> str | None:
        """What changes when `file` is written anew; None if it is not there."""
        self._files.invalidate_cache(self._root)
        try:
            return str(self._files.ukey(self._place(file)))
        except FileNotFoundError:
            return None

    def create(self, file: str) -> BinaryIO:
        if self._files.protocol in ("memory", ("memory",)):  # which has folders
            self._files.makedirs(self._place(file).rpartition("/")[0], exist_ok=True)
        return self._files.open(self._place(file), "wb")

    def open(self, file: str) -> BinaryIO:
        return self._files.open(self._place(file), "rb", block_size=_READ_AHEAD)

    def files(self) -> list[str]:
        return self._entries("file")

    def folders(self) -> list[str]:
        return self._entries("directory")

    def _entries(self, kind: str) -> list[str]:
        self._files.invalidate_cache(self._root)
        try:
            entries = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == kind)

    def remove(self, file: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._place(file))

    def remove_all(self) -> None:
        with suppress(FileNotFoundError):
            self._files.rm(self._root, recursive=True)


def is_url(path: Any) -> bool:
    """Whether `path` names a place in an object store, such as ``s3://bucket/folder``."""
    return isinstance(path, str) and _URL.match(path) is not None and not path.startswith("file://")


def local_or_url(path: Any, what: str = "a path, such as 'checkpoints/step-1000', or a URL") -> Path | str:
    """`path` as a Path, or as it is if it is a URL.

    Args:
        what: says what is expected, for the message.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(path, str) and path.startswith("file://"):
        path = path.removeprefix("file://")
    return path if is_url(path) else as_path(path, what)


def open_store(path: str | PathLike[str]) -> Store:
    """The folder at `path`, which may be a URL of an object store."""
    place = local_or_url(path)
    return LocalStore(place) if isinstance(place, Path) else RemoteStore(place)


def sync(stream: BinaryIO) -> None:
    """Returns when the disk has what was written to `stream`. An object store has it once it is closed."""
    stream.flush()
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):  # not a file of this machine
        return
    os.fsync(descriptor)
