"""Exports weights to a directory as Hugging Face's ``save_pretrained`` makes it, one tensor at a time.

The format is https://huggingface.co/docs/safetensors: the length of a JSON header, the header with each tensor's dtype,
shape and place, then the bytes. The library of that name, and torch's ``HuggingFaceStorageWriter``, write a file from
all of its tensors at once, which takes twice a file's size in memory.
"""

import json
import os
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorshard.common.folders import WholeFolder
from tensorshard.common.stores import UploadedFolder, folder_to_write
from tensorshard.model.transformers_settings import is_of_peft, is_of_transformers
from tensorshard.plan.field_checks import size_in_bytes
from tensorshard.weights.files.stored_weights import CONFIGS, local_configs
from tensorshard.weights.files.transformers_weights import StoredNames

MAX_SHARD_SIZE = "5GB"
"""The default for the largest file of weights; Hugging Face uses the same."""

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8

# What such directories are made of; the first four tell them from other ones.
_FILES = (
    "*.safetensors", "config.json", "adapter_config.json", "model.pt",
    "*.safetensors.index.json", "generation_config.json",
)  # fmt: skip


class Export:
    """A directory of weights that is being written. It gets its own name when it is complete.

    Args:
        directory: the path, or a URL of an object store.
        structure: the model, for its names and config; None to keep names as they are.
        layouts: for each name, tied ones once, a tensor of its shape and dtype on the meta device.
        dtype: of floating-point tensors in the files; None to keep their own.
        max_shard_size: largest size of a file, in bytes or as text such as "5GB".
        overwrite: whether an older directory of weights is replaced, once this one is complete.

    Raises:
        FileExistsError: the directory is there, and must not be replaced.
        ValueError: a size or a dtype is not valid.
    """

    def __init__(
        self,
        directory: Path | str,
        structure: nn.Module | None,
        layouts: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        overwrite: bool = False,
    ) -> None:
        size = check_arguments(dtype, max_shard_size)
        self._folder = weights_folder(directory, overwrite=overwrite)
        plain = structure
        self._names = StoredNames(plain, layouts)
        stored = {name: _cast(layout, dtype) for name, layout in self._names.layouts.items()}
        temporary = self._folder.begin()
        self._writer = SafetensorsWriter(temporary, stored, size)
        if structure is not None:
            write_configs(structure, temporary, dtype)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor, by the model's name."""
        for stored, value in self._names.add(name, tensor):
            self._writer.write(stored, value)

    def finish(self) -> None:
        """Gives the directory its name."""
        self._writer.finish()
        self._folder.finish()

    def discard(self) -> None:
        """Removes what was written."""
        self._folder.discard()


def check_arguments(dtype: torch.dtype | None, max_shard_size: int | str) -> int:
    """`max_shard_size` in bytes, if the other arguments are valid, too."""
    size = size_in_bytes("max_shard_size", max_shard_size)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype!r} was given; it must be a floating-point torch.dtype, or None")
    return size


def weights_folder(directory: Path | str, *, overwrite: bool) -> WholeFolder | UploadedFolder:
    """A directory of weights, or such a place in an object store, that is about to be written.

    Raises:
        FileExistsError: it is there, and must not be replaced.
    """
    return folder_to_write(directory, _FILES, needed=4, kind="a directory of weights", overwrite=overwrite)


def export_all(tensors: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
    """Writes all of `tensors`, or nothing; the other arguments are those of :class:`Export`."""
    export = Export(*args, **kwargs)
    try:
        for name, tensor in tensors:
            export.add(name, tensor)
            del tensor  # before the next is read
        export.finish()
    except BaseException:
        export.discard()
        raise


def write_configs(model: nn.Module, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Writes ``config.json`` and ``generation_config.json`` for a model of transformers, or such a base of peft's;
    nothing for others."""
    if is_of_peft(model):
        model = model.get_base_model()  # type: ignore[operator]
    if not is_of_transformers(model):
        return
    config: Any = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():  # type: ignore[operator]
        generation.save_pretrained(directory)


def model_from_configs(place: Path | str) -> nn.Module | None:
    """The model that :func:`write_configs` described, on the meta device; None where there is no ``config.json``."""
    directory = local_configs(place)
    if not (directory / CONFIGS[0]).is_file():
        return None
    from tensorshard.weights.files.transformers_weights import model_of

    with torch.device("meta"):
        return model_of(directory)()


def _cast(layout: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return layout if dtype is None or not layout.is_floating_point() else layout.to(dtype)


class SafetensorsWriter:
    """Files in `directory` with room for tensors, which are written in any order: their sizes are known before values.

    The names are Hugging Face's: ``model.safetensors``; or, if that would be too large for one file,
    ``model-00001-of-00003.safetensors`` and so on, and ``model.safetensors.index.json``.

    Args:
        directory: exists, and is empty.
        layouts: for each tensor's name, a tensor of its shape and dtype on the meta device.
        max_shard_size: bytes of tensors in a file; a larger tensor has one of its own.

    Raises:
        ValueError: a dtype that safetensors does not have.
    """

    def __init__(self, directory: Path, layouts: Mapping[str, torch.Tensor], max_shard_size: int) -> None:
        groups = _grouped(layouts, max_shard_size)
        self._files = [directory / name for name in _file_names(len(groups))]
        self._places: dict[str, tuple[Path, int]] = {}
        self._layouts = layouts
        self._left = set(layouts)
        for file, names in zip(self._files, groups, strict=True):
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            offset = 0
            for name in names:
                layout = layouts[name]
                header[name] = {
                    "dtype": _dtype_name(name, layout.dtype),
                    "shape": list(layout.shape),
                    "data_offsets": [offset, offset + layout.nbytes],
                }
                offset += layout.nbytes
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % _ALIGNMENT)
            start = 8 + len(text)
            for name in names:
                self._places[name] = file, start + header[name]["data_offsets"][0]
            with file.open("wb") as stream:
                stream.write(len(text).to_bytes(8, "little") + text)
                stream.truncate(start + offset)
        if len(groups) > 1:
            weight_map = {name: file.name for name, (file, _) in sorted(self._places.items())}
            size = sum(layout.nbytes for layout in layouts.values())
            document = {"metadata": {"total_size": size}, "weight_map": weight_map}
            index = directory / "model.safetensors.index.json"
            index.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            self._files.append(index)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the values of `tensor` to their place, cast to the dtype of its layout. Its shape must be the same."""
        layout = self._layouts[name]
        if tensor.shape != layout.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} and was announced with {tuple(layout.shape)}")
        file, offset = self._places[name]
        values = tensor.detach().to("cpu", layout.dtype).contiguous()
        with file.open("r+b") as stream:
            stream.seek(offset)
            values.reshape(-1).view(torch.uint8).numpy().tofile(stream)
        self._left.discard(name)

    def finish(self) -> None:
        """Flushes the files to the disk.

        Raises:
            RuntimeError: a tensor of `layouts` was not written.
        """
        if self._left:
            raise RuntimeError(f"{len(self._left)} tensors were not written, such as {min(self._left)}")
        for file in self._files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _grouped(layouts: Mapping[str, torch.Tensor], max_shard_size: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, layout in layouts.items():
        if groups[-1] and size + layout.nbytes > max_shard_size:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += layout.nbytes
    return groups


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{place:05d}-of-{count:05d}.safetensors" for place in range(1, count + 1)]


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise ValueError(f"{name} is of {dtype}, which safetensors does not have")
    return _DTYPES[dtype]
