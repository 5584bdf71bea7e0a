"""Folders that are written on this machine's disk, and then copied to an object store."""

import shutil
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from tensorshard.common.folders import WholeFolder
from tensorshard.common.stores import RemoteStore

_BLOCK = 16 << 20  # bytes that are copied at a time


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
