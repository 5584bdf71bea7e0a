"""Writes safetensors one tensor at a time. Sizes are known before values, so each tensor has its place in its file.

The format is https://huggingface.co/docs/safetensors: the length of a JSON header, the header with each tensor's dtype,
shape and place, then the bytes. The library of that name only writes a file from a dict of all of its tensors.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


class SafetensorsWriter:
    """Files in `directory` with room for tensors, which are written in any order.

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
