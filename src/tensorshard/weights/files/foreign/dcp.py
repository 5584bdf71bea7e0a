"""Folders of ``torch.distributed.checkpoint``: of FSDP and FSDP2 by any script, of Accelerate, and of torchtitan."""

import io
import mmap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from tensorshard.common.stores import LocalStore
from tensorshard.torch_private.fake_tensors import layout_in_file
from tensorshard.weights.files.checkpoint_files import read_metadata
from tensorshard.weights.files.foreign.pieces import Contents, ForeignTensor, Piece, load_safely, without_module
from tensorshard.weights.files.foreign.torch_files import add_flat_optimizer, add_rest
from tensorshard.weights.files.manifest import check_sizes

_MODELS = ("model", "module", "state_dict", "model_state_dict")
_OPTIMIZERS = ("optimizer", "optim", "optimizers", "optimizer_state_dict", "optim_state_dict")
_OTHERS = ("lr_scheduler", "scheduler", "lr_schedulers", "train_state", "dataloader", "rng_state", "rng")


class DcpFolder:
    """The entries of a folder, by their paths in the state dict that was saved.

    Raises:
        DamagedCheckpointError: a rank's file is missing or cut off.
        ValueError: the metadata could run code, or values are stored in a way that is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata: Metadata = read_metadata(folder)
        self._last: tuple[MetadataIndex, Any] | None = None  # what was read last: several pieces may be parts of it
        ends: dict[str, int] = {}
        for place in self.metadata.storage_data.values():
            if getattr(place, "transform_descriptors", None):
                raise ValueError(
                    f"{folder} was written with a StreamTransformExtension ({', '.join(place.transform_descriptors)}), "
                    f"which is not read: save it once without"
                )
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        check_sizes(LocalStore(folder), ends, at_least=True)

    def paths(self) -> dict[str, tuple[str, ...]]:
        """The path of each entry."""
        known = self.metadata.planner_data
        known = known if isinstance(known, Mapping) else {}
        return {key: tuple(str(part) for part in known.get(key, (key,))) for key in self.metadata.state_dict_metadata}

    def tensor(self, key: str) -> ForeignTensor:
        """The tensor `key`, whose pieces are views of the mapped files: only what is used of them is read."""
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        pieces = [
            Piece(tuple(chunk.offsets), tuple(chunk.sizes), partial(self._load, MetadataIndex(key, chunk.offsets)))
            for chunk in entry.chunks
            if chunk.sizes.numel()
        ]
        return ForeignTensor(tuple(entry.size), entry.properties.dtype, pieces)

    def value(self, key: str) -> Any:
        """The entry `key`: a :class:`ForeignTensor`, or what was saved that is none."""
        if isinstance(self.metadata.state_dict_metadata[key], BytesStorageMetadata):
            return self._load(MetadataIndex(key))
        return self.tensor(key)

    def _load(self, index: MetadataIndex) -> Any:
        last = self._last
        if last is not None and last[0] == index:
            return last[1]
        place = self.metadata.storage_data[index]
        file = self.folder / place.relative_path
        page = place.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        first = place.offset - page
        with file.open("rb") as stream:  # mapped so that torch may write to it, which changes no file
            mapped = mmap.mmap(stream.fileno(), first + place.length, access=mmap.ACCESS_COPY, offset=page)
        window = _Window(memoryview(mapped)[first:])
        load = partial(load_safely, cast("IO[bytes]", window), f"{index.fqn} in {file}")
        value: Any
        if isinstance(self.metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            layout, start = layout_in_file(load)
            count = layout.untyped_storage().nbytes() // layout.itemsize
            flat = torch.frombuffer(mapped, dtype=layout.dtype, count=count, offset=first + start)
            value = flat.as_strided(layout.shape, layout.stride(), layout.storage_offset())
        else:
            value = load()
        self._last = index, value
        return value


class _Window(io.RawIOBase):
    """A part of a file that is mapped into memory."""

    def __init__(self, part: memoryview) -> None:
        self._part = part
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        self._at = to + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._part)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        part = self._part[self._at : self._at + len(room)]
        room[: len(part)] = part
        self._at += len(part)
        return len(part)


def read(folder: Path, optimizer_folder: Path | None = None) -> Contents:
    """What a folder of ``torch.distributed.checkpoint`` holds.

    Args:
        optimizer_folder: another one with the optimizer's states, as Accelerate writes it.
    """
    there = DcpFolder(folder)
    paths = there.paths()
    contents = Contents("torch.distributed.checkpoint")
    nested = {key: path[1:] if path[0] in ("app", "state") and len(path) > 2 else path for key, path in paths.items()}
    top = {path[0] for path in nested.values() if len(path) > 1}
    model = next((name for name in _MODELS if name in top), None)
    weights: dict[str, str] = {}
    rest: dict[str, Any] = {}
    for key, path in nested.items():
        if path[0] in _OPTIMIZERS or path[0].partition(".")[0] in _OPTIMIZERS:
            continue
        is_tensor = isinstance(there.metadata.state_dict_metadata[key], TensorStorageMetadata)
        if model is not None and path[0] == model:
            if is_tensor:
                weights[".".join(path[1:])] = key
        elif model is None and len(path) == 1 and is_tensor and path[0].partition(".")[0] not in (*_OTHERS, "step"):
            weights[path[0]] = key
        elif path[0].partition(".")[0] in ("dataloader", "rng", "rng_state"):
            continue  # states of other programs' loaders and generators, which they pickle
        else:
            _put(rest, path, there, key)
    prefix = without_module(weights)
    contents.weights = {name.removeprefix(prefix): there.tensor(key) for name, key in weights.items()}
    if not contents.weights:
        raise ValueError(
            f"{folder} is a folder of torch.distributed.checkpoint without weights: it has "
            f"{', '.join(list(paths)[:5])}; weights are looked for under {', '.join(_MODELS)}, or at the top"
        )
    add_rest(contents, _titan(rest))
    if optimizer_folder is not None:
        there = DcpFolder(optimizer_folder)
        nested = there.paths()
    _add_optimizer(contents, there, nested, prefix)
    return contents


def _put(rest: dict[str, Any], path: tuple[str, ...], there: DcpFolder, key: str) -> None:
    value = there.value(key)
    if isinstance(value, ForeignTensor):
        if value.shape not in ((), (1,)):
            return  # tensors of things that are neither weights nor the optimizer's
        value = value.pieces[0].read()
    inner = rest
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            return
    inner[path[-1]] = value


def _titan(rest: dict[str, Any]) -> dict[str, Any]:
    """`rest` with the names that torchtitan joins by dots, such as ``train_state.step``, as nested ones."""
    nested: dict[str, Any] = {}
    for key, value in rest.items():
        first, _, name = key.partition(".")
        if name and first in _OTHERS:
            nested.setdefault(first, {})[name] = value
        else:
            nested[key] = value
    return nested


def _add_optimizer(contents: Contents, there: DcpFolder, paths: Mapping[str, tuple[str, ...]], prefix: str) -> None:
    flat: dict[str, Any] = {}
    groups: Any = None
    for key, path in paths.items():
        first, dot, dotted = ".".join(path).partition(".")
        if first not in _OPTIMIZERS or not dot:
            continue
        dotted = dotted.removeprefix("0.")  # the first of several optimizers
        if dotted == "param_groups":
            groups = there.value(key)
        elif dotted.startswith(("state.", "param_groups.")):
            flat[dotted] = there.value(key)
    if isinstance(groups, list):
        flat.update(
            {f"param_groups.{at}.{key}": value for at, group in enumerate(groups) for key, value in group.items()}
        )
    add_flat_optimizer(contents, flat, prefix)
    unknown = [name for names, _ in contents.groups for name in names if name not in contents.weights]
    unknown += [name for of_key in contents.states.values() for name in of_key if name not in contents.weights]
    if unknown:
        raise ValueError(
            f"{there.folder} has states of an optimizer for {unknown[0]!r}, which is the name of none of its weights: "
            f"save them with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which names them"
        )
