"""Checkpoints of other programs: their names become those of this model and optimizer; and they are written as ours.

Other programs don't say which tensors are buffers, store tied weights under any of their names, and may number the
optimizer's parameters. The model that loads the checkpoint settles all three.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tensorshard.checkpoint.destinations import destination
from tensorshard.checkpoint.writing import RankFile, manifest_of
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.model.parameters import buffer_aliases
from tensorshard.weights.files.checkpoint_files import OpenCheckpoint
from tensorshard.weights.files.foreign.megatron import by_names_of
from tensorshard.weights.files.foreign.opening import open_any
from tensorshard.weights.files.foreign.pieces import ForeignCheckpoint
from tensorshard.weights.files.manifest import MANIFEST, entry_of
from tensorshard.weights.files.stored_weights import CONFIGS

_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names that the Trainer of transformers trains without weight decay, in its second group."""
_KEYS = {  # of states, and the optimizers of torch that have them
    frozenset({"exp_avg", "exp_avg_sq"}): "Adam",
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}): "Adam",
    frozenset({"momentum_buffer"}): "SGD",
}


def fit_weights(checkpoint: OpenCheckpoint, sharded: ShardedModel) -> OpenCheckpoint:
    """`checkpoint` of another program, with this model's names of parameters and buffers."""
    checkpoint = by_names_of(checkpoint, sharded.structure, sharded.full_shapes(), sharded.aliases())
    first = sharded.aliases() | buffer_aliases(sharded.structure)
    buffers, transient = sharded.buffer_shapes(), {name for name, _ in sharded.structure.named_buffers()}
    names: dict[str, str] = {}
    taken: set[str] = set()
    for key in checkpoint.metadata.state_dict_metadata:
        kind, _, name = key.partition(".")
        if kind != "model":
            names[key] = key
            continue
        name = first.get(name, name)
        if name in transient and name not in buffers and name not in sharded.full_shapes():
            continue  # a buffer that state dicts leave out here
        new = f"buffers.{name}" if name in buffers else f"model.{name}"
        if new not in taken:
            taken.add(new)
            names[key] = new
    return checkpoint.renamed(names)


def fit_optimizer(
    checkpoint: OpenCheckpoint, sharded: ShardedModel, members: Sequence[Sequence[str]], *, whole: bool
) -> OpenCheckpoint:
    """`checkpoint` of another program, with this model's names in what it has of the optimizer.

    Args:
        members: names of the parameters in each of this optimizer's groups; "" where another rank has one.
        whole: whether these are all of the model's, which they aren't in a pipeline.

    Raises:
        ValueError: the files number parameters, and which ones are meant cannot be told; or its states are not read.
    """
    _refuse_unread(checkpoint)
    entries = checkpoint.document["optimizer"]
    stored = [group["names"] for group in entries["groups"]]
    first = dict(sharded.aliases())
    if any(name.startswith("#") for names in stored for name in names):
        new_names = _numbered(checkpoint, sharded, stored, members) if whole else None
        if new_names is None:
            sizes, here = ([len(group) for group in groups] for groups in (stored, members))
            raise ValueError(
                f"{checkpoint.store.name} numbers the parameters of its optimizer, in groups of {sizes}, and this "
                f"engine's optimizer has groups of {here}{'' if whole else ' on this stage'}: which is which cannot be "
                f"told. Build the optimizer with the groups that it had there, in the same order"
                + ("" if whole else ", load it once under a plan without pp, and save it")
            )
        first.update(new_names)
    names: dict[str, str] = {}
    for key in checkpoint.metadata.state_dict_metadata:
        kind, _, rest = key.partition(".")
        state, _, name = rest.partition(".")
        names[key] = f"optimizer.{state}.{first.get(name, name)}" if kind == "optimizer" else key
    groups = [{**group, "names": [first.get(name, name) for name in group["names"]]} for group in entries["groups"]]
    document = {**checkpoint.document, "optimizer": {**entries, "groups": groups}}
    return replace(checkpoint.renamed(names), document=document)


def _refuse_unread(checkpoint: OpenCheckpoint) -> None:
    if "unread" in checkpoint.document["imported"]:
        raise ValueError(f"{checkpoint.store.name} {checkpoint.document['imported']['unread']}")


def _numbered(
    checkpoint: OpenCheckpoint, sharded: ShardedModel, stored: Sequence[Sequence[str]], members: Sequence[Sequence[str]]
) -> dict[str, str] | None:
    """The names of numbered parameters: by the groups here if they have the same sizes, or by the usual orders."""
    order = [name for name in sharded.full_shapes() if any(name in group for group in members)]
    decayed = [name for name in order if not _is_without_decay(sharded.structure, name)]
    rest = [name for name in order if name not in set(decayed)]
    for groups in (members, [order], [decayed, rest]):
        if [len(group) for group in groups] != [len(group) for group in stored] or any("" in group for group in groups):
            continue
        new_names = {
            old: new for olds, news in zip(stored, groups, strict=True) for old, new in zip(olds, news, strict=True)
        }
        if _shapes_agree(checkpoint, sharded, new_names):
            return new_names
    return None


def _is_without_decay(model: nn.Module, name: str) -> bool:
    path = name.split(".")
    above = [module for at in range(1, len(path)) if (module := _child(model, ".".join(path[:at]))) is not None]
    return any(isinstance(module, nn.LayerNorm) for module in above) or bool(_WITHOUT_DECAY.search(name.lower()))


def _child(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _shapes_agree(checkpoint: OpenCheckpoint, sharded: ShardedModel, new_names: Mapping[str, str]) -> bool:
    shapes = sharded.full_shapes()
    for key, entry in checkpoint.metadata.state_dict_metadata.items():
        kind, _, rest = key.partition(".")
        name = rest.partition(".")[2]
        size: Any = getattr(entry, "size", ())
        if kind == "optimizer" and len(size) and name in new_names and tuple(size) != tuple(shapes[new_names[name]]):
            return False
    return True


def why_other_optimizer(checkpoint_keys: set[str], entries: Mapping[str, Any], kind: str, group: Any) -> str | None:
    """Why an optimizer of the class `kind`, with the options of `group`, cannot go on from these states."""
    theirs = _KEYS.get(frozenset(checkpoint_keys - {"step"}))
    if theirs is not None and theirs not in kind:
        return f"has the states of {theirs} ({', '.join(sorted(checkpoint_keys))}), and this engine has {kind}"
    if "SGD" in kind and checkpoint_keys and theirs is None:
        return f"has the states {', '.join(sorted(checkpoint_keys))}, and this engine has {kind}"
    for stored in entries["groups"]:
        for option in ("decoupled_weight_decay", "amsgrad", "nesterov"):
            then, now = stored["options"].get(option), group.get(option)
            if then is not None and now is not None and bool(then) != bool(now):
                return f"was written with {option}={then}, and this engine's {kind} has {now}"
    return None


def import_checkpoint(source: Path, target: Path | str, *, overwrite: bool = False) -> OpenCheckpoint:
    """Writes another program's checkpoint as one of tensorshard, in one process, a piece of a tensor at a time.

    Args:
        source: the folder, or a file of full state dicts.
        target: the folder to write, or a URL that fsspec knows.
        overwrite: whether an older checkpoint at `target` is replaced, once this one is complete.

    Returns:
        What was read, for a description.

    Raises:
        FileNotFoundError: `source` is of no program that is known.
        FileExistsError: `target` is there already.
        ValueError: `source` is tensorshard's own; a file of it is missing, cut off or could run code. Nothing was
            written.
    """
    checkpoint = open_any(source)
    if not isinstance(checkpoint, ForeignCheckpoint):
        raise ValueError(f"{source} is a checkpoint of tensorshard already: engine.load reads it, under any plan")
    _refuse_unread(checkpoint)
    place = destination(target, overwrite=overwrite)
    store = place.begin()
    try:
        file = RankFile(store, f"{place.prefix}tensors-0.bin")
        try:
            for name, tensor in checkpoint.tensors.items():
                for piece in tensor.pieces:
                    chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.sizes))
                    properties = TensorProperties(dtype=tensor.dtype)
                    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(tensor.shape))
                    index = MetadataIndex(name, chunk.offsets)
                    file.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data), piece.read())
            report = file.finish()
        except BaseException:
            file.close()
            raise
        further = {"engine.json": json.dumps(checkpoint.document, indent=1).encode()}
        folder = source if source.is_dir() else source.parent
        further.update({name: (folder / name).read_bytes() for name in CONFIGS if (folder / name).is_file()})
        entries = {}
        for name, content in further.items():
            store.write(place.prefix + name, content)
            entries[place.prefix + name] = entry_of(content)
        store.write(MANIFEST, manifest_of(f"{place.prefix}engine.json", entries, [report]).to_bytes())
    except BaseException:
        place.discard()
        raise
    place.finish()
    return checkpoint
