"""Writes the parts of a training state to a checkpoint, and reads them.

A checkpoint is a folder, or a place in an object store. Each rank writes what it holds of the tensors to one file, by
the names of the original model, so that any other layout can read it. ``engine.json`` has everything that is not a
tensor, and ``manifest.json``, which is written last, says where each tensor is, and has the sizes and checksums of all
files.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tensorshard.checkpoint.background import BackgroundSave, Messages
from tensorshard.checkpoint.between_saves import LastPlan, StagingMemory
from tensorshard.checkpoint.destinations import Destination, destination
from tensorshard.checkpoint.parts import Part, Stored
from tensorshard.checkpoint.pieces import PiecesLoadPlanner
from tensorshard.checkpoint.writing import PlannedTensors, RankFile, Report, Staged, manifest_of
from tensorshard.comm.decisions import decide_once, meet, succeed_together
from tensorshard.common.folders import recover
from tensorshard.common.stores import Store, open_store
from tensorshard.common.words import kind_of
from tensorshard.host.memory import available_on_host
from tensorshard.plan.storage import TemporaryCopy
from tensorshard.weights.files.checkpoint_files import OpenCheckpoint, read_into
from tensorshard.weights.files.foreign.opening import open_any
from tensorshard.weights.files.manifest import FORMAT, MANIFEST, DamagedCheckpointError, entry_of

_Result = TypeVar("_Result")

_SHARE = 0.5  # of the host's free memory, which the copies of a save in the background take at most


class CheckpointManager:
    """Saves and loads the parts of one training state. Both calls are collectives of `group`.

    Args:
        parts: in the order in which they are checked and restored. Those that may refuse what they are given come
            first.
        device: on which this rank's messages are sent.
        make_copy: makes memory that is read into before anything is changed.
        last_plan: of the last save of the same training.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        group: dist.ProcessGroup,
        device: torch.device,
        make_copy: Callable[[], TemporaryCopy],
        last_plan: LastPlan,
    ) -> None:
        self._parts = parts
        self._group = group
        self._device = device
        self._make_copy = make_copy
        self._last_plan = last_plan

    def save(self, target: Path | str, extra: Any, *, overwrite: bool = False) -> None:
        """Writes a checkpoint to `target`, a folder or a URL, with `extra` beside the parts.

        Args:
            overwrite: whether an older checkpoint is replaced, once this one is complete.
        """
        writing = self._begin(target, extra, overwrite=overwrite)
        try:
            reports = self._together(writing.write)
        except _RanksFailedError as error:
            writing.discard()
            raise RuntimeError(f"engine.save could not write {target}, {_left(target)}: {error}") from error
        decide_once(lambda: writing.complete(reports), self._group)

    def save_in_background(
        self, target: Path | str, extra: Any, *, overwrite: bool = False, memory: StagingMemory
    ) -> BackgroundSave:
        """Begins what :meth:`save` does; returns when the values that it writes may change.

        Args:
            memory: that they are copied to.
        """
        writing = self._begin(target, extra, overwrite=overwrite)

        def stage() -> tuple[RankFile, Staged]:
            available = available_on_host()
            room = None if available is None else int(available * _SHARE / _ranks_here(self._group))
            if room is not None:
                room = max(room, memory.size)
            staged = Staged(writing.planned, room, memory)
            file = writing.file()
            for item, value in staged.rest:
                file.append(item, value)
            staged.rest.clear()
            return file, staged

        try:
            file, staged = succeed_together(stage, self._group, "engine.save")
        except Exception as error:
            writing.discard()
            if isinstance(error, OSError):
                raise OSError(f"engine.save could not write {target}, {_left(target)}: {error}") from error
            raise
        return BackgroundSave(
            str(target),
            file,
            staged,
            Messages(self._group),
            complete=writing.complete,
            discard=writing.discard,
        )

    def _begin(self, target: Path | str, extra: Any, *, overwrite: bool) -> "_Writing":
        group = self._group
        meet("engine.save", group, self._device)
        entries = succeed_together(lambda: self._entries(extra), group, "engine.save")
        document: dict[str, Any] = {"format": FORMAT}
        for part, its_entries in zip(self._parts, entries, strict=True):
            document.update(part.gather(its_entries))
        text = json.dumps({**document, "extra": extra}, indent=1)
        tensors = {name: tensor for part in self._parts for name, tensor in part.tensors().items()}
        planned = PlannedTensors(tensors, group, self._device, self._last_plan)
        place: Destination | None = None
        files: dict[str, bytes] = {}

        def begin() -> tuple[str, str]:
            nonlocal place, files
            place = destination(target, overwrite=overwrite)
            files = {"engine.json": text.encode(), **self._further_files()}
            try:
                return place.begin().name, place.prefix
            except OSError as error:
                raise OSError(
                    f"the checkpoint {target} cannot be written: {error}; nothing was written. Save to a folder that "
                    f"this user may write to"
                ) from error

        name, prefix = decide_once(begin, group)
        return _Writing(planned, open_store(name), f"{prefix}tensors-{group.rank()}.bin", place, files)

    def _further_files(self) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            for part in self._parts:
                part.write_files(Path(folder))
            return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}

    def _entries(self, extra: Any) -> list[dict[str, Any]]:
        if not isinstance(extra, dict):
            raise TypeError(f"extra is {kind_of(extra)}; it must be a dict of numbers, strings, lists and dicts")
        entries = [part.entries() for part in self._parts]
        try:
            json.dumps([*entries, extra])
        except TypeError as error:
            raise TypeError(
                f"a checkpoint's extra must be made of numbers, strings, lists and dicts with string keys: {error}"
            ) from error
        return entries

    def _together(self, action: Callable[[], _Result]) -> list[_Result]:
        """What `action` returns on all ranks. A collective.

        Raises:
            _RanksFailedError: it failed on a rank; on all of them.
        """
        result: _Result | None = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes: list[Any] = [(result, message, isinstance(failure, DamagedCheckpointError))]
        if self._group.size() > 1 and dist.get_backend(self._group) != "fake":
            outcome, outcomes = outcomes[0], [None] * self._group.size()
            dist.all_gather_object(outcomes, outcome, group=self._group)
        messages = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(outcomes) if text is not None]
        if messages:
            raise _RanksFailedError("; ".join(messages), damaged=any(damaged for *_, damaged in outcomes)) from failure
        return [result for result, _, _ in outcomes]

    def load(self, source: Path | str) -> dict[str, Any]:
        """Reads the checkpoint at `source`, a folder or a URL; returns its `extra`.

        Everything is read and checked before anything is changed. That takes room for the tensors once more.
        """
        group = self._group
        meet("engine.load", group, self._device)
        if isinstance(source, Path):
            decide_once(lambda: recover(source), group)
        checkpoint = succeed_together(lambda: self._read_description(source), group, "engine.load")
        stored = Stored(source, checkpoint.document, checkpoint.metadata)
        for part in self._parts:
            part.begin_load(stored)
        copy = succeed_together(self._make_copy, group, "engine.load")
        tensors = {name: tensor for part in self._parts for name, tensor in part.room(stored, copy).items()}
        try:
            self._together(lambda: read_into(checkpoint, tensors, PiecesLoadPlanner()))
        except _RanksFailedError as error:
            kind = DamagedCheckpointError if error.damaged else ValueError
            raise kind(f"{source} cannot be read, and nothing was changed: {error}") from error.__cause__
        for part in self._parts:
            part.restore(stored)
        return stored.document["extra"]

    def _read_description(self, source: Path | str) -> OpenCheckpoint:
        """Reads what `source` says about itself, and checks that the parts fit.

        Raises:
            FileNotFoundError: `source` is not a checkpoint.
            ValueError: it is of another model, or of another optimizer.
        """
        checkpoint = open_any(source)
        if "imported" in checkpoint.document:
            for part in self._parts:
                checkpoint = part.fit(checkpoint)
        for part in self._parts:
            part.check(Stored(source, checkpoint.document, checkpoint.metadata))
        return checkpoint


class _RanksFailedError(RuntimeError):
    """What went wrong on which ranks.

    Args:
        damaged: whether a rank has found a damaged checkpoint.
    """

    def __init__(self, message: str, *, damaged: bool) -> None:
        self.damaged = damaged
        super().__init__(message)


class _Writing:
    """A checkpoint that is being written.

    Args:
        planned: what this rank writes.
        store: where all ranks write.
        name: of this rank's file.
        place: on rank 0; None elsewhere.
        files: further ones, which rank 0 writes.
    """

    def __init__(
        self, planned: PlannedTensors, store: Store, name: str, place: Destination | None, files: dict[str, bytes]
    ) -> None:
        self.planned = planned
        self._store = store
        self._name = name
        self._place = place
        self._files = files

    def file(self) -> RankFile:
        """The file of this rank."""
        return RankFile(self._store, self._name)

    def write(self) -> Report:
        """Writes what this rank writes, from where it is."""
        file = self.file()
        try:
            for item in self.planned.items:
                file.append(item, self.planned.value(item))
            return file.finish()
        except BaseException:
            file.close()
            raise

    def complete(self, reports: Sequence[Report]) -> None:
        """Ends the checkpoint, on rank 0."""
        assert self._place is not None  # on the rank that decides
        try:
            entries = {}
            for name, data in self._files.items():
                self._store.write(self._place.prefix + name, data)
                entries[self._place.prefix + name] = entry_of(data)
            manifest = manifest_of(f"{self._place.prefix}engine.json", entries, reports)
            self._store.write(MANIFEST, manifest.to_bytes())
        except BaseException:
            self._place.discard()
            raise
        self._place.finish()

    def discard(self) -> None:
        """Removes what was written, on rank 0."""
        if self._place is not None:
            self._place.discard()


def _ranks_here(group: dist.ProcessGroup) -> int:
    """How many ranks share this machine's memory; all of them, where the launcher does not say."""
    try:
        return max(1, int(os.environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError):
        return group.size()


def _left(target: Path | str) -> str:
    if isinstance(target, str):
        return "and an older checkpoint there is as it was"
    return "which is as it was" if target.exists() else "which is not there now"
