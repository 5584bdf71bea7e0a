"""What a checkpoint holds, writing it and reading it.

A checkpoint is a folder: torch's distributed checkpoint of the tensors (each rank writes what it holds, by the names of
the original model, so that any other layout can read it), and ``engine.json`` for everything that is not a tensor.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tensorshard.checkpoint.optimizer_states import check_optimizer, empty_optimizer_states, restore_optimizer
from tensorshard.checkpoint.pieces import PiecesLoadPlanner, PiecesSavePlanner, TensorPieces
from tensorshard.comm.decisions import decide_once, meet, succeed_together
from tensorshard.comm.sharding import to_local
from tensorshard.common.paths import read_utf8
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import AXES, Plan
from tensorshard.plan.storage import Storage, TemporaryCopy
from tensorshard.sharded.sharded_model import ShardedModel
from tensorshard.weights.files.checkpoint_files import SafeReader, read_metadata
from tensorshard.weights.files.export import write_configs

if TYPE_CHECKING:
    from tensorshard.engine.random_streams import RandomStreams

_FORMAT = 1

logger = logging.getLogger("tensorshard")


class TrainingState(Protocol):
    """What is saved and loaded: the attributes of :class:`tensorshard.Engine` that a checkpoint needs."""

    plan: Plan
    mesh: Mesh
    device: torch.device
    sharded: ShardedModel
    scaler: Any
    step_count: int
    random: "RandomStreams"
    loaders: Any
    loader_states: dict[str, dict[str, int]]
    storage: Storage

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


def save(engine: TrainingState, path: str | os.PathLike[str], extra: dict[str, Any]) -> None:
    """Writes a checkpoint of `engine` to the folder `path`; :meth:`tensorshard.Engine.save` calls it."""
    target, group = Path(path), engine.mesh.world_group
    temporary = target.with_name(f".{target.name}.saving")
    meet("engine.save", group, engine.device)
    own = succeed_together(lambda: _document(engine, extra), group, "engine.save")
    document = json.dumps(_gathered(engine, own), indent=1)
    decide_once(lambda: _make_folder(target, temporary), group)
    try:
        dcp.save(_tensors(engine), storage_writer=dcp.FileSystemWriter(temporary), planner=PiecesSavePlanner())
    except CheckpointException as error:  # raised on every rank; its class is not derived from Exception
        if engine.mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise RuntimeError(f"engine.save could not write {target}, which is not there now: {_causes(error)}") from error
    structure = engine.sharded.structure
    decide_once(lambda: _complete_folder(target, temporary, document, structure), group)


def _make_folder(target: Path, temporary: Path) -> None:
    """Makes the folder that becomes `target` once it is whole.

    Raises:
        FileExistsError: `target` is there.
        OSError: it cannot be written.
    """
    if target.exists():
        raise FileExistsError(
            f"{target} is there already and is not overwritten; save under another name, or move it away"
        )
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a crash
        temporary.mkdir(parents=True)
    except OSError as error:
        raise OSError(
            f"the checkpoint {target} cannot be written: {error}; nothing was written. Save to a folder that this "
            f"user may write to"
        ) from error


def _complete_folder(target: Path, temporary: Path, document: str, structure: nn.Module) -> None:
    write_configs(structure, temporary)  # for exports of the checkpoint
    _write_durably(temporary / "engine.json", document)
    temporary.rename(target)
    _sync_folder(target.parent)


def load(engine: TrainingState, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the checkpoint at `path` into `engine`; :meth:`tensorshard.Engine.load` calls it.

    Everything is read and checked before the engine is changed. That takes room for the tensors once more: on disk, if
    the plan offloads to disk.
    """
    source, group = Path(path), engine.mesh.world_group
    meet("engine.load", group, engine.device)
    document, metadata = succeed_together(lambda: _read_description(engine, source), group, "engine.load")
    engine.sharded.finish_gather()
    masters = {name: master.detach() for name, master in engine.sharded.masters().items()}
    buffers = engine.sharded.persistent_buffers()
    room = succeed_together(engine.storage.temporary_copy, group, "engine.load")
    new_masters, new_buffers = _room_like(masters, room), _room_like(buffers, room)
    states = empty_optimizer_states(engine, metadata, room)
    tensors = _model_tensors(engine, new_masters, new_buffers)
    for name, values in states.items():
        shape = engine.sharded.masters()[name].shape
        for key, value in values.items():
            tensors[f"optimizer.{key}.{name}"] = _laid_out(engine, name, value) if value.shape == shape else value
    generators = _stored_generators(engine, metadata, document)
    tensors.update({_generator_key(engine, device): state for device, state in generators.items()})
    try:
        dcp.load(tensors, storage_reader=SafeReader(source), planner=PiecesLoadPlanner())
    except CheckpointException as error:
        raise ValueError(f"{source} cannot be read, and nothing was changed: {_causes(error)}") from error
    restore_optimizer(engine, states, document)
    _copy_each(masters, new_masters)
    _copy_each(buffers, new_buffers)
    engine.sharded.all_gather_loaded()
    engine.step_count = document["step_count"]
    if engine.scaler is not None and document["scaler"] is not None:
        engine.scaler.load_state_dict(document["scaler"])
    if generators:
        engine.random.load_states(generators)
    else:
        engine.random.begin(engine.step_count)
    engine.loader_states = dict(document.get("loaders", {}))
    for name, loader in engine.loaders.items():
        if name in engine.loader_states:
            loader.load_state_dict(engine.loader_states.pop(name))
    return document["extra"]


def _read_description(engine: TrainingState, source: Path) -> tuple[dict[str, Any], Metadata]:
    """Reads ``engine.json`` and the metadata of `source`, and checks that they fit `engine`.

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
    metadata = read_metadata(source)
    _check_matches(engine, metadata, source)
    check_optimizer(engine, document["optimizer"], source)
    return document, metadata


def _room_like(tensors: Mapping[str, torch.Tensor], room: TemporaryCopy) -> dict[str, torch.Tensor]:
    """Empty tensors of the sizes that `tensors` have on this rank, laid out like them."""
    return {name: room.like(tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def _copy_each(to: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in to.items():
        to_local(tensor).copy_(to_local(values[name]))


def _causes(error: CheckpointException) -> str:
    """What went wrong on which rank, in one line."""
    causes = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in sorted(causes.items()))


def _document(engine: TrainingState, extra: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(extra, dict):
        raise TypeError(f"extra is a {type(extra).__name__}; it must be a dict of numbers, strings, lists and dicts")
    names: dict[torch.Tensor, str] = {p: name for name, p in engine.sharded.masters().items()}
    groups = [
        {
            "names": [names[p] for p in group["params"] if p in names],
            "options": {k: v for k, v in group.items() if k not in ("params", "param_names") and _is_plain(v)},
        }
        for group in engine.optimizer.param_groups
    ]
    scalars = {
        names[p]: {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
        for p, state in engine.optimizer.state.items()
    }
    document = {
        "format": _FORMAT,
        "step_count": engine.step_count,
        "plan": engine.plan.to_dict(),
        "world_size": engine.mesh.world_size,
        "scaler": None if engine.scaler is None else engine.scaler.state_dict(),
        "aliases": {name: first for name, first in engine.sharded.aliases().items() if name != first},
        "loaders": {name: loader.state_dict() for name, loader in engine.loaders.items()},
        "optimizer": {
            "class": type(engine.optimizer).__name__,
            "groups": groups,
            "scalars": {name: s for name, s in scalars.items() if s},
        },
        "extra": extra,
    }
    try:
        json.dumps(document)
    except TypeError as error:
        raise TypeError(
            f"a checkpoint's extra must be made of numbers, strings, lists and dicts with string keys: {error}"
        ) from error
    return document


def _gathered(engine: TrainingState, document: dict[str, Any]) -> dict[str, Any]:
    """`document` with the options and states of the parameters that other ranks of the pipeline hold."""
    if engine.mesh.degrees["pp"] == 1:
        return document
    group = engine.mesh.group("pp")
    documents: list[Any] = [None] * group.size()
    dist.all_gather_object(documents, document["optimizer"], group=group)
    groups = [
        {
            "names": list(dict.fromkeys(name for found in alike for name in found["names"])),
            "options": next((found["options"] for found in alike if found["names"]), alike[0]["options"]),
        }
        for alike in zip(*(found["groups"] for found in documents), strict=True)
    ]
    scalars = {name: values for found in documents for name, values in found["scalars"].items()}
    return {**document, "optimizer": {**document["optimizer"], "groups": groups, "scalars": scalars}}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def _laid_out(engine: TrainingState, name: str, tensor: torch.Tensor) -> Any:
    """`tensor`, laid out as the master weight or buffer `name`, in the form for the storage: parts with their places in
    the full tensor."""
    sharded = engine.sharded
    layout = sharded.split.layout(name)
    if layout.dim is None:
        return tensor
    ranges = layout.ranges(sharded.split.rank, sharded.split.size)
    shape = sharded.split.full_shape(name, tensor.shape)
    return TensorPieces.of(tensor, shape, layout.dim, ranges)


def _model_tensors(
    engine: TrainingState, masters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    tensors = {f"model.{name}": _laid_out(engine, name, master) for name, master in masters.items()}
    tensors.update({f"buffers.{name}": _laid_out(engine, name, buffer) for name, buffer in buffers.items()})
    return tensors


def _tensors(engine: TrainingState) -> dict[str, Any]:
    masters = {name: master.detach() for name, master in engine.sharded.masters().items()}
    tensors = _model_tensors(engine, masters, engine.sharded.owned_buffers())
    names: dict[torch.Tensor, str] = {p: name for name, p in engine.sharded.masters().items()}
    for parameter, state in engine.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                name = names[parameter]
                tensors[f"optimizer.{key}.{name}"] = (
                    _laid_out(engine, name, value) if value.shape == parameter.shape else value
                )
    tensors.update({_generator_key(engine, device): s for device, s in engine.random.states().items()})
    return tensors


def _check_matches(engine: TrainingState, metadata: Metadata, source: Path) -> None:
    shapes = {f"model.{name}": shape for name, shape in engine.sharded.full_shapes().items()}
    shapes.update({f"buffers.{name}": shape for name, shape in engine.sharded.buffer_shapes().items()})
    stored = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(("model.", "buffers.")) and isinstance(entry, TensorStorageMetadata)
    }
    missing = [key for key in shapes if key not in stored]
    unknown = [key for key in stored if key not in shapes]
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"{len(missing)} tensors of the model are not in it, such as {missing[0]}")
        if unknown:
            parts.append(f"it has {len(unknown)} that the model does not have, such as {unknown[0]}")
        raise ValueError(f"{source} is a checkpoint of another model: {'; '.join(parts)}")
    for key, shape in shapes.items():
        if tuple(stored[key].size) != tuple(shape):
            raise ValueError(
                f"{source} is a checkpoint of another model: {key} has shape {tuple(stored[key].size)} in it and "
                f"{tuple(shape)} in the model"
            )


def _generator_key(engine: TrainingState, device: str) -> str:
    return f"generator.{device}.{engine.mesh.rank}"


def _stored_generators(engine: TrainingState, metadata: Metadata, document: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Room for the stored state of each of this rank's random streams; {} if the checkpoint has another layout.

    The layout decides which ranks draw the same random numbers. With the streams of two data ranks, for example, two
    tensor-parallel ranks would drop different elements of one activation.
    """
    wanted = {device: _generator_key(engine, device) for device in engine.random.states()}
    axes = {axis: (document["plan"].get(axis), getattr(engine.plan, axis)) for axis in AXES}
    changed = [f"{axis}={old} then and {new} now" for axis, (old, new) in axes.items() if old != new]
    if not changed and all(key in metadata.state_dict_metadata for key in wanted.values()):
        rooms = {}
        for device, key in wanted.items():
            entry = metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            rooms[device] = torch.empty(entry.size, dtype=torch.uint8)
        return rooms
    if engine.mesh.rank == 0:
        logger.warning(
            "the checkpoint's random state is not restored, because the layout has changed (%s); dropout goes on with "
            "random numbers from the seed and the step",
            ", ".join(changed) or "on other devices",
        )
    return {}


def _write_durably(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
