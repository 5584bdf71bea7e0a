"""Exports a checkpoint's weights for other programs, one tensor at a time, on one process, without the model."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tensorshard.common.folders import WholeFolder
from tensorshard.common.stores import UploadedFolder
from tensorshard.model.quantized import refuse_export
from tensorshard.weights.files.adapted_checkpoint import AdaptedCheckpoint, tied_names
from tensorshard.weights.files.adapters import AdapterExport
from tensorshard.weights.files.checkpoint_files import CheckpointWeights
from tensorshard.weights.files.export import MAX_SHARD_SIZE, export_all, model_from_configs, weights_folder
from tensorshard.weights.files.foreign.opening import in_names_of
from tensorshard.weights.files.weight_files import open_weight_files


def export_checkpoint(
    checkpoint: Path | str,
    target: Path | str,
    *,
    to: str = "hf",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    merge: bool = False,
) -> list[str]:
    """Writes the weights of `checkpoint` for programs that know nothing of tensorshard.

    Of a model of peft it writes the adapters alone, as peft's own ``save_pretrained`` does (with ``to="torch"`` all
    weights, by that model's names), or the base with the adapters merged into it.

    Args:
        checkpoint: what :meth:`tensorshard.Engine.save` wrote, under any plan; a folder or a URL.
        target: the directory to write, or a URL; must not exist, or be empty.
        to: "hf" for what Hugging Face's ``save_pretrained`` writes: safetensors, and ``config.json`` if the model is
            one of transformers; "torch" for one file ``model.pt`` with the state dict, as ``torch.save`` writes it.
        dtype: of floating-point tensors; None for that of the master weights.
        max_shard_size: bytes in a file of safetensors, or text such as "5GB".
        overwrite: whether an older directory of weights at `target` is replaced, once this one is complete.
        merge: whether the active adapters of a model of peft are merged into its base, as ``merge_and_unload`` does.
            This takes the memory of the whole model.

    Returns:
        The names of the adapters, if these alone were written.

    Raises:
        FileNotFoundError: `checkpoint` is not a checkpoint.
        FileExistsError: `target` is there already, and must not be replaced.
        ValueError: `to` is something else; `max_shard_size` is not a size, or `dtype` not a floating-point type; the
            checkpoint is damaged, or has quantized weights; or it was imported from Megatron without a config.json;
            or there are no adapters to `merge`, or no whole base.
        ImportError: it has adapters, and peft is not installed.
    """
    if to not in ("hf", "torch"):
        raise ValueError(f"to={to!r} was given; it must be 'hf' or 'torch'")
    has_adapters = AdaptedCheckpoint.is_at(checkpoint)
    adapters_alone = has_adapters and to == "hf" and not merge
    model = None if has_adapters else model_from_configs(checkpoint)
    weights = in_names_of(CheckpointWeights(checkpoint, partial=adapters_alone), model)
    options: dict[str, Any] = dict(dtype=dtype, max_shard_size=max_shard_size)
    if merge and not has_adapters:
        raise ValueError(f"merge=True was given, and {checkpoint} has no adapters of peft: export it without")
    if adapters_alone:
        adapted = AdaptedCheckpoint(checkpoint)
        _export_adapters(target, adapted, weights, overwrite=overwrite, **options)
        return adapted.names
    refuse_export(weights.document.get("quantized", {}), "an export")
    aliases = weights.document.get("aliases", {})
    read: Mapping[str, torch.Tensor] = weights
    layouts = {name: weights.layout(name) for name in weights}
    if merge:
        weights_folder(target, overwrite=overwrite)  # before all weights are read
        model = AdaptedCheckpoint(checkpoint).merged(weights)
        merged = model.state_dict()
        aliases = tied_names(merged)
        read = {name: tensor for name, tensor in merged.items() if name not in aliases}
        layouts = {name: tensor.to("meta") for name, tensor in read.items()}
    tensors = ((name, read[name]) for name in layouts)
    if to == "hf":
        export_all(tensors, target, model, layouts, overwrite=overwrite, **options)
        return []
    folder = weights_folder(target, overwrite=overwrite)  # before the weights are first written as safetensors
    # torch.save needs the whole state dict. So it is written as safetensors first: its tensors are then mapped files,
    # which take no memory.
    with _mapped_beside(target) as mapped:
        export_all(tensors, mapped, None, layouts, **options)
        _pickle(mapped, folder, aliases)
    return []


def _export_adapters(
    target: Path | str, adapted: AdaptedCheckpoint, weights: CheckpointWeights, **options: Any
) -> None:
    adapted.check_complete(weights)
    trained = {name for group in weights.document["optimizer"]["groups"] for name in group["names"]}
    layouts = {name: weights.layout(name) for name in weights}
    aliases = {**{name: name for name in layouts}, **adapted.aliases(weights)}
    export = AdapterExport(target, adapted.model, layouts, aliases, trained.__contains__, adapters_only=True, **options)
    try:
        for name in export.needed:
            export.add(name, weights[name])
        export.finish()
    except BaseException:
        export.discard()
        raise


@contextmanager
def _mapped_beside(target: Path | str) -> Iterator[Path]:
    """A folder for files that are mapped into memory, on the disk of `target` where that is one. It is removed."""
    if isinstance(target, str):
        with tempfile.TemporaryDirectory() as above:
            yield Path(above) / "mapped"
        return
    mapped = target.with_name(f".{target.name}.mapped")
    try:
        shutil.rmtree(mapped, ignore_errors=True)  # left by a crash
        yield mapped
    finally:
        shutil.rmtree(mapped, ignore_errors=True)


def _pickle(mapped: Path, folder: WholeFolder | UploadedFolder, aliases: dict[str, str]) -> None:
    state = {name: file[name] for file in open_weight_files(mapped) for name in file}
    state.update({alias: state[first] for alias, first in aliases.items()})
    try:
        torch.save(state, folder.begin() / "model.pt")
        folder.finish()
    except BaseException:
        folder.discard()
        raise
