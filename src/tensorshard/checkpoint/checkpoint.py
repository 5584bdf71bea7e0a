"""What a checkpoint holds, writing it and reading it.

A checkpoint is a folder: torch's distributed checkpoint of the tensors (each rank writes what it holds, by the names of
the original model, so that any other layout can read it), and ``engine.json`` for everything that is no tensor.
"""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tensorshard.checkpoint.pieces import PiecesLoadPlanner, PiecesSavePlanner, TensorPieces
from tensorshard.comm.decisions import decide_once
from tensorshard.mesh import Mesh
from tensorshard.plan import AXES, Plan
from tensorshard.pretrained.export import write_configs
from tensorshard.pretrained.safe_reader import SafeReader, read_metadata
from tensorshard.sharded_model import ShardedModel

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
    optimizer: torch.optim.Optimizer
    scaler: Any
    step_count: int
    random: "RandomStreams"


def save(engine: TrainingState, path: str | os.PathLike[str], extra: dict[str, Any]) -> None:
    """Writes a checkpoint of `engine` to the folder `path`; :meth:`tensorshard.Engine.save` calls it."""
    target = Path(path)
    document = json.dumps(_gathered(engine, _document(engine, extra)), indent=1)
    if decide_once(target.exists, engine.mesh.world_group):
        raise FileExistsError(
            f"{target} is there already and is not overwritten; save under another name, or move it away"
        )
    temporary = target.with_name(f".{target.name}.saving")
    if engine.mesh.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # what a crash left
        temporary.mkdir(parents=True)
    dist.barrier()
    dcp.save(_tensors(engine), storage_writer=dcp.FileSystemWriter(temporary), planner=PiecesSavePlanner())
    if engine.mesh.rank == 0:
        write_configs(engine.sharded.structure, temporary)  # for who exports the checkpoint
        _write_durably(temporary / "engine.json", document)
        temporary.rename(target)
        _sync_folder(target.parent)
    dist.barrier()


def load(engine: TrainingState, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the checkpoint at `path` into `engine`; :meth:`tensorshard.Engine.load` calls it."""
    source = Path(path)
    if not (source / "engine.json").is_file():
        raise FileNotFoundError(f"{source} is no checkpoint of tensorshard: it has no file engine.json")
    document = json.loads((source / "engine.json").read_text())
    if document.get("format") != _FORMAT:
        raise ValueError(f"{source} has format {document.get('format')!r}; this version reads format {_FORMAT}")
    metadata = read_metadata(source)
    engine.sharded.finish_gather()
    tensors = _model_tensors(engine, engine.sharded.persistent_buffers())
    _check_matches(engine, metadata, source)
    states = _empty_optimizer_states(engine, metadata)
    for name, values in states.items():
        shape = engine.sharded.masters()[name].shape
        for key, value in values.items():
            tensors[f"optimizer.{key}.{name}"] = _laid_out(engine, name, value) if value.shape == shape else value
    generators = _stored_generators(engine, metadata, document)
    tensors.update({_generator_key(engine, device): state for device, state in generators.items()})
    dcp.load(tensors, storage_reader=SafeReader(source), planner=PiecesLoadPlanner())
    _restore_optimizer(engine, states, document)
    engine.sharded.all_gather_loaded()
    engine.step_count = document["step_count"]
    if engine.scaler is not None and document["scaler"] is not None:
        engine.scaler.load_state_dict(document["scaler"])
    if generators:
        engine.random.load_states(generators)
    else:
        engine.random.begin(engine.step_count)
    return document["extra"]


def _document(engine: TrainingState, extra: dict[str, Any]) -> dict[str, Any]:
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
        "optimizer": {"groups": groups, "scalars": {name: s for name, s in scalars.items() if s}},
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
    """`document` with what only the other ranks of a pipeline know: the options and states of their parameters."""
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
    return {**document, "optimizer": {"groups": groups, "scalars": scalars}}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def _laid_out(engine: TrainingState, name: str, tensor: torch.Tensor) -> Any:
    """`tensor`, laid out as the master or buffer `name`, as the storage sees it: parts at their places in the whole."""
    sharded = engine.sharded
    layout = sharded.split.layout(name)
    if layout.dim is None:
        return tensor
    ranges = layout.ranges(sharded.split.rank, sharded.split.size)
    shape = sharded.split.full_shape(name, tensor.shape)
    return TensorPieces.of(tensor, shape, layout.dim, ranges)


def _model_tensors(engine: TrainingState, buffers: dict[str, torch.Tensor]) -> dict[str, Any]:
    masters = engine.sharded.masters()
    tensors = {f"model.{name}": _laid_out(engine, name, master.detach()) for name, master in masters.items()}
    tensors.update({f"buffers.{name}": _laid_out(engine, name, buffer) for name, buffer in buffers.items()})
    return tensors


def _tensors(engine: TrainingState) -> dict[str, Any]:
    tensors = _model_tensors(engine, engine.sharded.owned_buffers())
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


def _empty_optimizer_states(engine: TrainingState, metadata: Metadata) -> dict[str, dict[str, torch.Tensor]]:
    """Room for the stored states of each parameter: laid out as the parameter where they have its shape."""
    masters = engine.sharded.masters()
    states: dict[str, dict[str, torch.Tensor]] = {}
    for full_key, entry in metadata.state_dict_metadata.items():
        if not full_key.startswith("optimizer.") or not isinstance(entry, TensorStorageMetadata):
            continue
        key, name = full_key.removeprefix("optimizer.").split(".", 1)
        if name not in masters:  # another pipeline rank's
            continue
        master = masters[name]
        dtype = entry.properties.dtype
        if entry.size == engine.sharded.full_shape(name) and master.dim() > 0:
            room = torch.zeros_like(master.detach(), dtype=dtype)
        else:
            room = torch.zeros(entry.size, dtype=dtype)
        states.setdefault(name, {})[key] = room
    return states


def _restore_optimizer(
    engine: TrainingState, states: dict[str, dict[str, torch.Tensor]], document: dict[str, Any]
) -> None:
    stored = document["optimizer"]
    names: dict[torch.Tensor, str] = {p: name for name, p in engine.sharded.masters().items()}
    current = engine.optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for place, (group, described) in enumerate(
        zip(engine.optimizer.param_groups, current["param_groups"], strict=True)
    ):
        members = [names.get(p, "") for p in group["params"]]
        # How a kernel is chosen belongs to this machine, not to the checkpoint.
        restored = {
            k: v
            for k, v in _options(stored["groups"], members, place).items()
            if k not in ("fused", "foreach", "capturable")
        }
        groups.append({**described, **restored})
        for index, name in zip(described["params"], members, strict=True):
            values: dict[str, Any] = {**states.get(name, {}), **stored["scalars"].get(name, {})}
            if values:
                state[index] = values
    engine.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _options(groups: list[dict[str, Any]], members: list[str], place: int) -> dict[str, Any]:
    """Options of the stored group that has `members`; of the one in the same place, where these are none."""
    for group in groups:
        if set(members) & set(group["names"]):
            return group["options"]
    return {} if any(members) or place >= len(groups) else groups[place]["options"]


def _generator_key(engine: TrainingState, device: str) -> str:
    return f"generator.{device}.{engine.mesh.rank}"


def _stored_generators(engine: TrainingState, metadata: Metadata, document: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Room for the stored state of each of this rank's random streams; {} where they do not belong to its place.

    Which ranks draw alike and which apart depends on the layout: streams of data ranks would have tensor-parallel ranks
    drop different things of one activation.
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
            "the checkpoint's random state is not restored, as the ranks are laid out otherwise (%s); dropout and the "
            "like go on with numbers made of the seed and the step",
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
