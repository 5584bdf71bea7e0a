"""Tensors that lie in pieces in the files of other programs, and what reads boxes of them."""

import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from tensorshard.common.stores import LocalStore
from tensorshard.weights.files.checkpoint_files import OpenCheckpoint, TensorReader
from tensorshard.weights.files.manifest import CheckedFile, DamagedCheckpointError, PieceEntry, as_bytes, box

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile, FSDP and recomputation put into names, wherever the module is that they wrap."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor.

    Args:
        offset: of its first element in the tensor.
        sizes: its shape.
        read: returns the box; a view of a mapped file where the format allows it.
    """

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor, and the pieces that together are all of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "ForeignTensor":
        """One that is there whole."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, [Piece((0,) * len(shape), shape, lambda: tensor)])

    @classmethod
    def of_flat(cls, shape: Iterable[int], runs: Iterable[torch.Tensor]) -> "ForeignTensor":
        """One whose elements lie in order in `runs`, which are 1-D; more elements than it has are padding."""
        shape, runs = tuple(shape), list(runs)
        pieces, start, count = [], 0, math.prod(shape)
        for run in runs:
            stop = min(start + run.numel(), count)
            for offset, sizes, first in boxes(shape, start, stop):
                view = run.narrow(0, first - start, math.prod(sizes)).view(sizes)
                pieces.append(Piece(offset, sizes, lambda view=view: view))  # type: ignore[misc]
            start = stop
        return cls(shape, runs[0].dtype if runs else torch.float32, pieces)

    def missing(self) -> int:
        """How many elements no piece has."""
        return math.prod(self.shape) - sum(math.prod(piece.sizes) for piece in self.pieces)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The boxes that the elements `start` to `stop` of a tensor consist of: offset, sizes, and the first element."""
    if start >= stop:
        return
    if not shape:
        yield (), (), start
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    ends = [(start, stop)] if first > last else [(start, first * row), (last * row, stop)]
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row
    for low, high in ends:
        if low < high:
            index = low // row
            for offset, sizes, element in boxes(shape[1:], low - index * row, high - index * row):
                yield (index, *offset), (1, *sizes), index * row + element


class _PieceReader(TensorReader):
    """Reads boxes of tensors in pieces."""

    def read_items(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        read: tuple[Piece, torch.Tensor] | None = None
        for item in items:
            piece = self._metadata.storage_data[item.storage_index]
            if read is None or read[0] is not piece:
                read = piece, piece.read()
            target = planner.resolve_tensor(item).detach()
            target.copy_(read[1][box(item.storage_offsets, item.lengths)])
            planner.commit_tensor(item, target)


@dataclass(frozen=True)
class ForeignCheckpoint(OpenCheckpoint):
    """Another program's checkpoint, which is read as one of ours.

    Args:
        tensors: by the names that ours have: ``model.NAME`` and ``optimizer.KEY.NAME``.
    """

    tensors: dict[str, ForeignTensor]

    def reader(self) -> StorageReader:
        return _PieceReader(self.metadata)

    def renamed(self, names: Mapping[str, str]) -> "ForeignCheckpoint":
        return self.with_tensors({names[name]: tensor for name, tensor in self.tensors.items() if name in names})

    def with_tensors(self, tensors: dict[str, ForeignTensor]) -> "ForeignCheckpoint":
        """The same with other tensors."""
        return replace(self, tensors=tensors, metadata=_metadata_of(tensors))


def in_pieces(checkpoint: OpenCheckpoint) -> ForeignCheckpoint:
    """`checkpoint`, which may be one that was imported, as tensors whose pieces are read one by one."""
    if isinstance(checkpoint, ForeignCheckpoint):
        return checkpoint
    assert checkpoint.manifest is not None  # format 1 is of no other program
    tensors = {
        name: ForeignTensor(
            tuple(entry.shape),
            entry.torch_dtype,
            [Piece(p.offset, p.sizes, partial(_read_piece, checkpoint, p, entry.torch_dtype)) for p in entry.pieces],
        )
        for name, entry in checkpoint.manifest.tensors.items()
    }
    return ForeignCheckpoint(checkpoint.store, checkpoint.document, checkpoint.metadata, None, tensors)


def _read_piece(checkpoint: OpenCheckpoint, piece: PieceEntry, dtype: torch.dtype) -> torch.Tensor:
    assert checkpoint.manifest is not None
    room = torch.empty(piece.sizes, dtype=dtype)
    with CheckedFile(checkpoint.store, piece.file, checkpoint.manifest.files[piece.file]) as stream:
        stream.read_into(piece.start, as_bytes(room))
    return room


def _metadata_of(tensors: Mapping[str, ForeignTensor]) -> Metadata:
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
            chunks=[ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.sizes)) for piece in tensor.pieces],
        )
        for name, tensor in tensors.items()
    }
    places = {
        MetadataIndex(name, torch.Size(piece.offset)): piece
        for name, tensor in tensors.items()
        for piece in tensor.pieces
    }
    return Metadata(state_dict_metadata=entries, storage_data=places)


@dataclass
class Contents:
    """What was found in another program's checkpoint.

    Args:
        source: whose it is, for messages, such as "DeepSpeed, ZeRO 2 on 8 ranks".
        weights: by the model's names; buffers among them.
        states: of the optimizer, by key (``exp_avg``) and by the parameter's name.
        groups: of the optimizer: the names of their parameters and their options. Names are ``#0``, ``#1`` ... if the
            files number parameters in the order of the groups instead of naming them.
        step: optimizer steps so far; None if the files don't say.
        scaler: of fp16's loss.
        extra: what else there is, such as the scheduler's state.
        about: what fitting it to a model needs; ``unread`` says why the optimizer's states are not read.
    """

    source: str
    weights: dict[str, ForeignTensor] = field(default_factory=dict)
    states: dict[str, dict[str, ForeignTensor]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)
    step: int | None = None
    scaler: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def opened(self, folder: Path) -> ForeignCheckpoint:
        """The checkpoint in `folder` that these are the contents of.

        Raises:
            DamagedCheckpointError: a part of a tensor is missing.
        """
        tensors = {f"model.{plain_name(name)}": tensor for name, tensor in self.weights.items()}
        for key, of_key in self.states.items():
            tensors.update({f"optimizer.{key}.{plain_name(name)}": tensor for name, tensor in of_key.items()})
        for name, tensor in tensors.items():
            if tensor.missing():
                raise DamagedCheckpointError(
                    f"{folder} is not complete: {name.partition('.')[2]} has {math.prod(tensor.shape):,} elements, of "
                    f"which {tensor.missing():,} are in none of its files"
                )
        document = {
            "format": 2,
            "imported": {"source": self.source, **self.about},
            "aliases": {},
            "optimizer": {
                "class": None,
                "groups": [
                    {"names": [plain_name(name) for name in names], "options": plain_values(options)}
                    for names, options in self.groups
                ],
                "scalars": {},
            },
            "step_count": self._steps(),
            "scaler": self.scaler,
            "plan": {},
            "extra": plain_values(self.extra),
        }
        return ForeignCheckpoint(LocalStore(folder), document, _metadata_of(tensors), None, tensors)

    def _steps(self) -> int:
        if self.step is not None:
            return self.step
        return max((int(tensor.pieces[0].read()) for tensor in self.states.get("step", {}).values()), default=0)


def plain_name(name: str) -> str:
    """The name of a tensor without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def without_module(weights: Mapping[str, Any]) -> str:
    """The prefix that DistributedDataParallel has put before all names, or ""."""
    return "module." if weights and all(name.startswith("module.") for name in weights) else ""


def plain_values(value: Any) -> Any:
    """`value` without what JSON cannot hold; tensors of one element become numbers."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        pairs = ((str(key), plain_values(entry)) for key, entry in value.items())
        return {key: entry for key, entry in pairs if entry is not _NOT_PLAIN}
    if isinstance(value, list | tuple | set):
        return [entry for each in value if (entry := plain_values(each)) is not _NOT_PLAIN]
    return value if value is None or isinstance(value, bool | int | float | str) else _NOT_PLAIN


_NOT_PLAIN = object()


class _Standing:
    """Stands for an object of another program: its attributes, and none of its code."""

    def __init__(self, *values: Any, **named: Any) -> None:
        self.__dict__.update(named, values=values)


class _Stage(IntEnum):
    disabled, optimizer_states, gradients, weights = range(4)


# Classes that the files of DeepSpeed, Megatron and transformers name, and what takes their place.
_STANDING = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Stage,
    **{
        name: type(name.rpartition(".")[2], (_Standing,), {})
        for name in (
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.utils.tensor_fragment.fragment_address",
            "argparse.Namespace",
            "types.SimpleNamespace",
        )
    },
}


def load_safely(file: Path | IO[bytes], what: str | None = None, *, stands_for: tuple[str, ...] = ()) -> Any:
    """What ``torch.save`` wrote to `file`: tensors are mapped where it is a file, and no code is run.

    Args:
        what: to call it in messages.
        stands_for: beginnings of the names of further classes, whose objects become plain ones without code.

    Raises:
        DamagedCheckpointError: it is cut off.
        ValueError: it names something that could run code.
    """
    what = what or str(file)
    if isinstance(file, Path) and not zipfile.is_zipfile(file):
        raise DamagedCheckpointError(
            f"{what} is cut off, or is no file of torch.save: it has {file.stat().st_size:,} bytes without the end "
            f"that such a file has; copy the checkpoint again from where it came"
        )
    allowed: list[Any] = [(standing, name) for name, standing in _STANDING.items()]
    if stands_for:
        further = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        allowed += [(type("Standing", (_Standing,), {}), name) for name in further if name.startswith(stands_for)]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", mmap=isinstance(file, Path), weights_only=True)
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
        raise ValueError(
            f"{what} holds more than tensors, numbers and containers, and is not opened, because that could run code"
            + (f" ({lines[0]})" if lines else "")
        ) from error
    except (RuntimeError, EOFError, KeyError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise DamagedCheckpointError(f"{what} is damaged: {first}") from error
