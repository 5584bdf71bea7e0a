"""Writes the parts of a training state to a checkpoint, and reads them.

A checkpoint is a folder: torch's distributed checkpoint of the tensors (each rank writes what it holds, by the names of
the original model, so that any other layout can read it), and ``engine.json`` for everything that is not a tensor.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from tensorshard.checkpoint.parts import Part, Stored
from tensorshard.checkpoint.pieces import PiecesLoadPlanner, PiecesSavePlanner
from tensorshard.comm.decisions import decide_once, meet, succeed_together
from tensorshard.common.folders import WholeFolder, recover
from tensorshard.common.paths import read_utf8
from tensorshard.plan.storage import TemporaryCopy
from tensorshard.weights.files.checkpoint_files import SafeReader, read_metadata

_FORMAT = 1

# What a checkpoint is made of; the first tells it from other folders.
_FILES = ("engine.json", ".metadata", "*.distcp", "config.json", "generation_config.json")


class CheckpointManager:
    """Saves and loads the parts of one training state. Both calls are collectives of `group`.

    Args:
        parts: in the order in which they are checked and restored. Those that may refuse what they are given come
            first.
        device: on which this rank's messages are sent.
        make_copy: makes memory that is read into before anything is changed.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        group: dist.ProcessGroup,
        device: torch.device,
        make_copy: Callable[[], TemporaryCopy],
    ) -> None:
        self._parts = parts
        self._group = group
        self._device = device
        self._make_copy = make_copy

    def save(self, target: Path, extra: Any, *, overwrite: bool = False) -> None:
        """Writes a checkpoint to the folder `target`, with `extra` beside the parts.

        Args:
            overwrite: whether an older checkpoint is replaced, once this one is complete.
        """
        group = self._group
        folder: WholeFolder | None = None
        meet("engine.save", group, self._device)
        entries = succeed_together(lambda: self._entries(extra), group, "engine.save")
        document: dict[str, Any] = {"format": _FORMAT}
        for part, its_entries in zip(self._parts, entries, strict=True):
            document.update(part.gather(its_entries))
        text = json.dumps({**document, "extra": extra}, indent=1)

        def begin() -> Path:
            nonlocal folder
            folder = WholeFolder(target, _FILES, needed=1, kind="a checkpoint of engine.save", overwrite=overwrite)
            try:
                return folder.begin()
            except OSError as error:
                raise OSError(
                    f"the checkpoint {target} cannot be written: {error}; nothing was written. Save to a folder that "
                    f"this user may write to"
                ) from error

        temporary = decide_once(begin, group)
        tensors = {name: tensor for part in self._parts for name, tensor in part.tensors().items()}
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary), planner=PiecesSavePlanner())
        except CheckpointException as error:  # raised on every rank; its class is not derived from Exception
            if folder is not None:
                folder.discard()
            left = "which is as it was" if target.exists() else "which is not there now"
            raise RuntimeError(f"engine.save could not write {target}, {left}: {_causes(error)}") from error
        decide_once(lambda: self._complete_folder(folder, text), group)

    def _entries(self, extra: Any) -> list[dict[str, Any]]:
        if not isinstance(extra, dict):
            raise TypeError(
                f"extra is a {type(extra).__name__}; it must be a dict of numbers, strings, lists and dicts"
            )
        entries = [part.entries() for part in self._parts]
        try:
            json.dumps([*entries, extra])
        except TypeError as error:
            raise TypeError(
                f"a checkpoint's extra must be made of numbers, strings, lists and dicts with string keys: {error}"
            ) from error
        return entries

    def _complete_folder(self, folder: WholeFolder | None, document: str) -> None:
        assert folder is not None  # on the rank that decides
        for part in self._parts:
            part.write_files(folder.temporary)
        _write_durably(folder.temporary / "engine.json", document)
        folder.finish()

    def load(self, source: Path) -> dict[str, Any]:
        """Reads the checkpoint at `source`; returns its `extra`.

        Everything is read and checked before anything is changed. That takes room for the tensors once more.
        """
        group = self._group
        meet("engine.load", group, self._device)
        decide_once(lambda: recover(source), group)
        stored = succeed_together(lambda: self._read_description(source), group, "engine.load")
        for part in self._parts:
            part.begin_load()
        copy = succeed_together(self._make_copy, group, "engine.load")
        tensors = {name: tensor for part in self._parts for name, tensor in part.room(stored, copy).items()}
        try:
            dcp.load(tensors, storage_reader=SafeReader(source), planner=PiecesLoadPlanner())
        except CheckpointException as error:
            raise ValueError(f"{source} cannot be read, and nothing was changed: {_causes(error)}") from error
        for part in self._parts:
            part.restore(stored)
        return stored.document["extra"]

    def _read_description(self, source: Path) -> Stored:
        """Reads ``engine.json`` and the metadata of `source`, and checks that the parts fit.

        Raises:
            FileNotFoundError: `source` is not a checkpoint.
            ValueError: it is of another model, or of another optimizer.
        """
        if not (source / "engine.json").is_file():
            raise FileNotFoundError(f"{source} is not a checkpoint of tensorshard: it has no file engine.json")
        try:
            document = json.loads(read_utf8(source / "engine.json"))
        except ValueError as error:
            raise ValueError(f"{source / 'engine.json'} is damaged: {error}") from error
        if document.get("format") != _FORMAT:
            raise ValueError(f"{source} has format {document.get('format')!r}; this version reads format {_FORMAT}")
        stored = Stored(source, document, read_metadata(source))
        for part in self._parts:
            part.check(stored)
        return stored


def _causes(error: CheckpointException) -> str:
    """What went wrong on which rank, in one line."""
    causes = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in sorted(causes.items()))


def _write_durably(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
