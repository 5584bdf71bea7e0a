"""Folders that are whole or absent: written under another name, and renamed when they are complete."""

import ctypes
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux, in fcntl.h and linux/fs.h


class WholeFolder:
    """A folder that gets its name when it is complete.

    Args:
        target: its path.
        files: patterns of the names of what is written to such folders.
        needed: a folder that has none of the first so many of `files` is something else, and never replaced.
        kind: of the folder, for errors, such as "a checkpoint of engine.save".
        overwrite: whether an older one is replaced. What is in that one beside `files` is kept.

    Raises:
        FileExistsError: `target` is there, and must not be replaced.
        OSError: it cannot be written.
    """

    def __init__(self, target: Path, files: Sequence[str], *, needed: int, kind: str, overwrite: bool) -> None:
        self._target = target
        self._files = files
        self.temporary = target.with_name(f".{target.name}.saving")
        recover(target)
        is_empty = target.is_dir() and not any(target.iterdir())
        if target.exists() and not is_empty:
            if not overwrite:
                raise FileExistsError(
                    f"{target} is there already and is not overwritten; save under another name, move it away, or give "
                    f"overwrite=True, which replaces it once the new one is complete"
                )
            if not target.is_dir() or not any(self._is_own(entry, files[:needed]) for entry in target.iterdir()):
                raise FileExistsError(
                    f"{target} is there already and is not {kind}, so overwrite=True does not replace it; save under "
                    f"another name, or move it away"
                )

    @staticmethod
    def _is_own(entry: Path, files: Sequence[str]) -> bool:
        return any(fnmatch(entry.name, pattern) for pattern in files)

    def begin(self) -> Path:
        """Makes the folder that is written to; returns its path."""
        for left in (self.temporary, _aside(self._target)):  # by a crash
            shutil.rmtree(left, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        return self.temporary

    def finish(self) -> None:
        """Gives the complete folder its name. A crash leaves the older folder or this one, whole."""
        if self._target.exists():
            for entry in self._target.iterdir():
                new = self.temporary / entry.name
                if self._is_own(entry, self._files) or new.exists():
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.copytree(entry, new, symlinks=True)
                else:
                    shutil.copy2(entry, new, follow_symlinks=False)
            _sync(self.temporary)
            if not _exchange(self.temporary, self._target):
                aside = _aside(self._target)
                self._target.rename(aside)
                self.temporary.rename(self._target)
                aside.rename(self.temporary)
        else:
            _sync(self.temporary)
            self.temporary.rename(self._target)
        _sync(self._target.parent)
        self.discard()

    def discard(self) -> None:
        """Removes what was written, or what was replaced."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def recover(target: Path) -> None:
    """Brings back a folder whose replacement was interrupted between two renames, if there is one."""
    if not target.exists() and _aside(target).is_dir():
        _aside(target).rename(target)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two folders at once; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and not rename(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
