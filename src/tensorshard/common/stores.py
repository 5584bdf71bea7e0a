"""Folders of files, on disks and in object stores, behind one small interface.

Object stores are reached through fsspec, which torch brings. They have no rename and no folders: a file there is whole
or absent once it is closed, and a set of files is what one last file says it is.

Also here: copies of files of an object store on this machine's disk, for what maps files into memory.

Also here: folders that are written on this machine's disk, and then copied to an object store.
"""

import atexit
import hashlib
import logging
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from tensorshard.common.folders import WholeFolder
from tensorshard.common.paths import as_path, cache_folder
from tensorshard.common.words import install_extra

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_READ_AHEAD = 32 << 20  # bytes that one request to an object store asks for
logger = logging.getLogger("tensorshard")

_BLOCK = 16 << 20  # bytes that are copied at a time


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
                f"{install_extra('s3')}"
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


def fetched(url: str, names: Mapping[str, str]) -> Path:
    """A folder with copies of files of the folder `url`; those that are not there are left out.

    They are copied once per machine, to the folder of caches (:func:`cache_folder`), where they stay. A file that was
    written anew in the store is copied anew. Processes of one machine wait for the one that copies.

    Args:
        names: of the files in the store, and of their copies.

    Raises:
        OSError: the store cannot be read, or the disk is full. Nothing is left that looks like a copy.
    """
    store = RemoteStore(url)
    versions = {name: version for name in names if (version := store.version(name)) is not None}
    named = "\n".join([url, *(f"{name} {names[name]} {version}" for name, version in sorted(versions.items()))])
    folder = _copies() / hashlib.sha256(named.encode()).hexdigest()[:20]
    with _alone(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            temporary = folder.with_name(f".{folder.name}.copying")
            shutil.rmtree(temporary, ignore_errors=True)  # left by a crash
            temporary.mkdir()
            logger.info("copying %s of %s to %s", ", ".join(versions) or "nothing", url, folder)
            try:
                for name in versions:
                    with store.open(name) as source, (temporary / names[name]).open("wb") as copy:
                        shutil.copyfileobj(source, copy, _BLOCK)
                temporary.rename(folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    return folder


def _copies() -> Path:
    cached = cache_folder()
    folder = _of_this_process() if cached is None else cached / "files"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def _of_this_process() -> Path:
    """Where nothing is cached: a folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="tensorshard-files-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Inside, no other process of this machine is in the same context. It ends with the process that dies in it."""
    with lock.open("w") as file:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class UploadedFolder:
    """A folder of an object store, with the methods of :class:`WholeFolder`.

    Its files are first written to a temporary folder of this machine, as they may be written in any order, and copied
    when all are complete, the JSON files last, which say what the others are. A store has no rename: while an older
    folder is replaced, files of both are there.

    Args:
        url: of the folder.
        files, needed, kind, overwrite: as for :class:`WholeFolder`.

    Raises:
        FileExistsError: `url` holds files, and must not be replaced.
    """

    def __init__(self, url: str, files: Sequence[str], *, needed: int, kind: str, overwrite: bool) -> None:
        self._store = RemoteStore(url)
        self._files = files
        there = self._store.files()
        if there and not overwrite:
            raise FileExistsError(
                f"{url} is there already and is not overwritten; save under another name, or give overwrite=True"
            )
        if there and not any(fnmatch(file, pattern) for file in there for pattern in files[:needed]):
            raise FileExistsError(
                f"{url} is there already and is not {kind}, so overwrite=True does not replace it; save under another "
                f"name"
            )
        self._temporary: Path | None = None

    def begin(self) -> Path:
        """Makes the folder that is written to; returns its path."""
        self._temporary = Path(tempfile.mkdtemp(prefix="tensorshard-upload-"))
        return self._temporary

    def finish(self) -> None:
        """Copies the complete folder to the store, and removes older files there that it has not."""
        assert self._temporary is not None
        written = [path for path in self._temporary.rglob("*") if path.is_file()]
        written.sort(key=lambda path: (path.suffix == ".json", path))
        names = [path.relative_to(self._temporary).as_posix() for path in written]
        for path, name in zip(written, names, strict=True):
            with path.open("rb") as source, self._store.create(name) as target:
                shutil.copyfileobj(source, target, _BLOCK)
        for file in self._store.files():
            if file not in names and any(fnmatch(file, pattern) for pattern in self._files):
                self._store.remove(file)
        self.discard()

    def discard(self) -> None:
        """Removes what was written to this machine's disk."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def folder_to_write(
    place: Path | str, files: Sequence[str], *, needed: int, kind: str, overwrite: bool
) -> WholeFolder | UploadedFolder:
    """What writes to `place`, a folder or a URL; the other arguments are those of :class:`WholeFolder`."""
    if isinstance(place, str):
        return UploadedFolder(place, files, needed=needed, kind=kind, overwrite=overwrite)
    return WholeFolder(place, files, needed=needed, kind=kind, overwrite=overwrite)
