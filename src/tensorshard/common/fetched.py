"""Copies of files of an object store on this machine's disk, for what maps files into memory."""

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tensorshard.common.paths import cache_folder
from tensorshard.common.stores import RemoteStore

logger = logging.getLogger("tensorshard")

_BLOCK = 16 << 20  # bytes that are copied at a time


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
