"""What one rank writes: its share of the tensors, in one file, and a report of it for the manifest.

torch's planner decides which rank writes which piece, so that what several ranks hold is written once. Values are
written from where they are, or from a copy in the host's memory that :class:`Staged` makes, so that training can go on.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from tensorshard.checkpoint.between_saves import LastPlan, StagingMemory
from tensorshard.checkpoint.pieces import TensorPieces
from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.sharding import to_local
from tensorshard.common.stores import Store, sync
from tensorshard.common.words import size_text
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.weights.files.manifest import (
    DTYPES,
    ChecksummedWriter,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    as_bytes,
)

logger = logging.getLogger("tensorshard")

_ALIGNMENT = 64  # bytes; no element lies across two of the machine's words

Report = dict[str, Any]
"""What a rank has written, in a form that JSON can hold."""


class PlannedTensors:
    """The pieces that this rank writes. Making it is a collective of `group`.

    Args:
        tensors: what this rank holds of each, by names in the checkpoint.
        device: on which this rank's messages are sent.
        last: of the last save; this one takes its place.
    """

    def __init__(self, tensors: dict[str, Any], group: dist.ProcessGroup, device: torch.device, last: LastPlan) -> None:
        self._tensors = tensors
        with without_torch_functions_of_tensors():
            layouts = {name: _layout(tensor) for name, tensor in tensors.items()}
            for name, (dtype, *_) in layouts.items():
                if str(dtype).removeprefix("torch.") not in DTYPES:
                    raise TypeError(
                        f"{name} has the dtype {dtype}, which checkpoints cannot hold; cast it to another one"
                    )
        same = torch.tensor(int(layouts == last.layouts), device=device)
        if group.size() > 1:
            all_reduce_(same, group, dist.ReduceOp.MIN, what="engine.save")
        if not same.item():
            last.layouts = None  # until all ranks have a plan
            last.items = self._plan(group)
            last.layouts = layouts
        self.items = last.items

    def _plan(self, group: dist.ProcessGroup) -> Sequence[WriteItem]:
        """What this rank writes, now that all ranks say what they hold."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(self._tensors, None, group.rank() == 0)
        own = planner.create_local_plan()
        if group.size() == 1 or dist.get_backend(group) == "fake":
            plans, _ = planner.create_global_plan([own])
            return planner.finish_plan(plans[0]).items
        everyone: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
        dist.gather_object(own, everyone, group=group, group_dst=0)
        outcomes: list[Any] | None = None
        if everyone is not None:
            try:
                outcomes = list(planner.create_global_plan(everyone)[0])
            except Exception as error:  # the planner found tensors that do not fit together
                outcomes = [f"{type(error).__name__}: {error}"] * group.size()
        received: list[Any] = [None]
        dist.scatter_object_list(received, outcomes, group=group, group_src=0)
        if isinstance(received[0], str):
            raise RuntimeError(f"the ranks' parts of the tensors do not fit together: {received[0]}")
        return planner.finish_plan(received[0]).items

    def value(self, item: WriteItem) -> torch.Tensor:
        """The piece that `item` stands for, where it is now."""
        tensor = self._tensors[item.index.fqn]
        piece = tensor.__get_tensor_shard__(item.index) if isinstance(tensor, TensorPieces) else to_local(tensor)
        return piece.detach()


def _layout(tensor: Any) -> tuple[Any, ...]:
    """What a plan depends on."""
    if isinstance(tensor, TensorPieces):
        return tensor.dtype, tensor.shape, [(offset, piece.shape) for offset, piece in tensor.pieces]
    if isinstance(tensor, DTensor):
        return tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh
    return tensor.dtype, tensor.shape


class RankFile:
    """The file of this rank, and what stands in it.

    Args:
        store: where it is written.
        file: its name.
    """

    def __init__(self, store: Store, file: str) -> None:
        self._file = file
        self._stream = store.create(file)
        self._writer = ChecksummedWriter(self._stream)
        self._pieces: dict[str, list[Any]] = {}

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._writer.size

    def append(self, item: WriteItem, value: torch.Tensor) -> None:
        """Writes the piece `value`."""
        data = item.tensor_data
        assert data is not None
        # An element must not lie across two words, for programs that map the file into memory.
        self._writer.write(bytes(-self._writer.size % _ALIGNMENT))
        start = self._writer.size
        self._writer.write(as_bytes(value.cpu().contiguous()))
        dtype = str(data.properties.dtype).removeprefix("torch.")
        entry = self._pieces.setdefault(item.index.fqn, [dtype, list(data.size), []])
        entry[2].append([list(data.chunk.offsets), list(data.chunk.sizes), self._file, start])

    def finish(self) -> Report:
        """Returns when the disk has the file."""
        sync(self._stream)
        self._stream.close()  # an object store has the file only then
        entry = self._writer.entry()
        return {"file": self._file, "size": entry.size, "checksums": entry.checksums, "pieces": self._pieces}

    def close(self) -> None:
        """Closes the file after an error."""
        self._stream.close()


class Staged:
    """A copy of pieces in the host's memory, which is pinned where they are a GPU's.

    Args:
        planned: whose pieces.
        room: bytes that the copy may take. What does not fit is in `rest`.
        memory: that the copy is made in.
    """

    def __init__(self, planned: PlannedTensors, room: int | None, memory: "StagingMemory") -> None:
        values = [(item, planned.value(item)) for item in planned.items]
        values.sort(key=lambda pair: pair[1].nbytes)
        self.rest: list[tuple[WriteItem, torch.Tensor]] = []
        self.staged: list[tuple[WriteItem, torch.Tensor]] = []
        size, places = 0, []
        for item, value in values:
            end = size + value.nbytes
            if room is not None and end > room:
                self.rest.append((item, value))
            else:
                places.append((item, value, size))
                size = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.size = size
        devices = {value.device for _, value, _ in places if value.device.type != "cpu"}
        flat = memory.take(size, next((device for device in devices if device.type == "cuda"), None))
        for item, value, start in places:
            copy = flat[start : start + value.nbytes].view(value.dtype).view(value.shape)
            copy.copy_(value, non_blocking=True)
            self.staged.append((item, copy))
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        if self.rest:
            logger.warning(
                "this rank has room for a copy of %s of what it saves in the background; training waits until the "
                "other %s are written",
                size_text(size),
                size_text(sum(value.nbytes for _, value in self.rest)),
            )


def manifest_of(document: str, others: dict[str, FileEntry], reports: Sequence[Report]) -> Manifest:
    """The manifest of a checkpoint.

    Args:
        document: the name of ``engine.json``.
        others: files beside those of the ranks.
        reports: of all ranks.
    """
    files = dict(others)
    tensors: dict[str, TensorEntry] = {}
    for report in reports:
        files[report["file"]] = FileEntry(report["size"], report["checksums"])
        for name, (dtype, shape, pieces) in report["pieces"].items():
            entry = tensors.setdefault(name, TensorEntry(dtype, tuple(shape)))
            entry.pieces += [PieceEntry(tuple(o), tuple(s), file, start) for o, s, file, start in pieces]
    return Manifest(document, files, tensors)
