"""Where a checkpoint is written: a folder that gets its name when it is whole, or a place in an object store.

An object store has no rename. There, the manifest decides: files have names of their own for each save, and what the
manifest names is the checkpoint. It is replaced at once, so an older checkpoint is whole until then.
"""

import re
import uuid
from abc import ABC, abstractmethod
from pathlib import Path

from tensorshard.common.folders import WholeFolder
from tensorshard.common.stores import LocalStore, RemoteStore, Store, open_store
from tensorshard.weights.files.manifest import MANIFEST

KIND = "a checkpoint of engine.save"

# What a checkpoint is made of; one of the first two tells it from other folders. Format 1 had .metadata and *.distcp.
_FILES = (
    "manifest.json",
    "engine.json",
    "tensors-*.bin",
    ".metadata",
    "*.distcp",
    "config.json",
    "generation_config.json",
    "adapters.json",
)
_WITHDRAWN = f"{MANIFEST}.damaged"
_OF_A_SAVE = re.compile(
    r"[0-9a-f]{8}-(engine\.json|tensors-\d+\.bin|config\.json|generation_config\.json|adapters\.json)|"
    + re.escape(_WITHDRAWN)
)


class Destination(ABC):
    """Where rank 0 begins and ends a checkpoint.

    Attributes:
        prefix: of the names of its files.
    """

    prefix = ""

    @abstractmethod
    def begin(self) -> Store:
        """Makes the place that is written to."""

    @abstractmethod
    def finish(self) -> None:
        """Called when all files are written, the manifest last."""

    @abstractmethod
    def discard(self) -> None:
        """Removes what was written."""


class LocalDestination(Destination):
    """A folder of this machine's file system.

    Raises:
        FileExistsError: `target` is there, and must not be replaced.
    """

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        self._folder = WholeFolder(target, _FILES, needed=2, kind=KIND, overwrite=overwrite)

    def begin(self) -> Store:
        return LocalStore(self._folder.begin())

    def finish(self) -> None:
        self._folder.finish()

    def discard(self) -> None:
        self._folder.discard()


class RemoteDestination(Destination):
    """A place in an object store.

    Raises:
        FileExistsError: `url` holds files, and must not be replaced.
    """

    def __init__(self, url: str, *, overwrite: bool) -> None:
        self._store = RemoteStore(url)
        self.prefix = f"{uuid.uuid4().hex[:8]}-"
        there = self._store.files()
        if MANIFEST in there and not overwrite:
            raise FileExistsError(
                f"{url} is there already and is not overwritten; save under another name, or give overwrite=True, "
                f"which replaces it once the new one is complete"
            )
        foreign = [file for file in there if not _OF_A_SAVE.fullmatch(file)]
        if MANIFEST not in there and foreign:
            raise FileExistsError(
                f"{url} holds files that are not of a checkpoint, such as {foreign[0]}; save under another name"
            )

    def begin(self) -> Store:
        return self._store

    def finish(self) -> None:
        for file in self._store.files():  # of the older checkpoint, or left by a crash
            if _OF_A_SAVE.fullmatch(file) and not file.startswith(self.prefix):
                self._store.remove(file)

    def discard(self) -> None:
        for file in self._store.files():
            if file.startswith(self.prefix):
                self._store.remove(file)


def destination(target: Path | str, *, overwrite: bool) -> Destination:
    """Where a checkpoint at `target`, a folder or a URL, is written.

    Raises:
        FileExistsError: it is there, and must not be replaced.
    """
    if isinstance(target, str):
        return RemoteDestination(target, overwrite=overwrite)
    return LocalDestination(target, overwrite=overwrite)


def is_written(url: str) -> bool:
    """Whether a checkpoint was written to its end at `url`."""
    return open_store(url).size(MANIFEST) is not None


def withdraw(url: str) -> str:
    """Makes the checkpoint at `url` none: gives its manifest another name, and returns that. The next save there
    removes what is left."""
    store = open_store(url)
    store.write(_WITHDRAWN, store.read(MANIFEST))
    store.remove(MANIFEST)
    return _WITHDRAWN


def remove(url: str) -> None:
    """Removes the checkpoint at `url`. A crash leaves a whole one, or none."""
    store = open_store(url)
    store.remove(MANIFEST)
    store.remove_all()
