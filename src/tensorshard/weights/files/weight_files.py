"""Files of weights, opened without reading them: safetensors, ``torch.save``'s, and tensorshard's checkpoints.

Tensors are views of memory-mapped files, so that only what is used is read.
"""

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tensorshard.common.stores import fetched, open_store
from tensorshard.weights.files.stored_weights import WeightFile, is_checkpoint_url

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_WITHIN = ("state_dict", "model", "model_state_dict")
"""Keys under which a training script's file often has the state dict, beside its optimizer's."""
_WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and DistributedDataParallel put before every name."""


class _Safetensors(WeightFile):
    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        super().__init__(path)
        try:
            self._file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file, or is cut off: {error}") from error
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def layout(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name).to("meta")  # memory-mapped, so nothing is read


class _Pickled(WeightFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not zipfile.is_zipfile(path):
            raise ValueError(
                f"{path} is not a file of torch.save, or one of torch before 1.6, which cannot be mapped into memory; "
                f"write it anew with torch.save(torch.load(file, weights_only=True), file)"
            )
        try:
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            first = next(iter(str(error).splitlines()), "")
            raise ValueError(
                f"{path} holds more than tensors, numbers and containers, and is not opened, because that could run "
                f"code; save model.state_dict() alone ({first})"
            ) from error
        self._tensors = _without_wrappers(_state_dict_in(loaded, path))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def layout(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach().to("meta")


def on_this_machine(place: Path | str) -> Path | str:
    """Where the files of weights at `place` can be opened: what is in an object store is copied, once per machine.

    Checkpoints of tensorshard's are read from the store, a tensor at a time.

    Args:
        place: a path, or the URL of a folder, of a file, or of an index of files.
    """
    if isinstance(place, Path) or is_checkpoint_url(place):
        return place
    folder, _, name = place.rstrip("/").rpartition("/")
    if Path(name).suffix in (".safetensors", *_PICKLED):
        return fetched(folder, {name: name}) / name
    if name in _INDICES:
        there = open_store(folder).files()
        return fetched(folder, {file: file for file in there if file == name or not file.endswith(".json")}) / name
    there = open_store(place).files()
    if any(file.endswith(".safetensors") for file in there):  # then the same weights may be there as pickles, too
        there = [file for file in there if Path(file).suffix not in _PICKLED]
    if not there:
        raise FileNotFoundError(f"there is no file or folder {place}")
    return fetched(place, {file: file for file in there})


def open_weight_files(path: Path | str) -> list[WeightFile]:
    """The files of weights at `path`.

    Args:
        path: a file; an index of files as Hugging Face writes it; a directory that has either, by Hugging Face's names,
            or a single file of weights of any name; or a checkpoint of tensorshard's, which alone may be a URL.

    Raises:
        FileNotFoundError: there is none, or the index names files that are not there.
        ValueError: a file cannot be read.
    """
    if isinstance(path, str) or (path / "engine.json").is_file():
        from tensorshard.weights.files.checkpoint_files import CheckpointWeights  # which brings torch's checkpoints

        return [CheckpointWeights(path)]
    if path.is_dir():
        path = _find_in(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of weights {path}")
    if path.suffix == ".json":
        return [_open(file) for file in _files_of(path)]
    return [_open(path)]


def _find_in(directory: Path) -> Path:
    for name in (*_INDICES, *_SINGLE):
        if (directory / name).is_file():
            return directory / name
    others = sorted(file for file in directory.iterdir() if file.suffix in (".safetensors", *_PICKLED))
    if len(others) == 1:
        return others[0]
    advice = f"it has {', '.join(file.name for file in others[:6])}: name one of them" if others else "it has none"
    raise FileNotFoundError(
        f"{directory} was given, where files of weights were expected ({', '.join((*_SINGLE, *_INDICES))}, or one file "
        f"ending in .safetensors or .pt); {advice}"
    )


def _files_of(index: Path) -> list[Path]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not an index of weights: it has no JSON object 'weight_map'") from error
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index} names {len(files)} files of weights, of which {len(missing)} are not there, such as {missing[0]}"
        )
    return files


def _open(file: Path) -> WeightFile:
    if file.suffix == ".safetensors":
        return _Safetensors(file)
    if file.suffix in _PICKLED:
        return _Pickled(file)
    raise ValueError(f"{file} ends in {file.suffix!r}; weights are read from .safetensors, {', '.join(_PICKLED)}")


def _state_dict_in(loaded: Any, path: Path) -> dict[str, torch.Tensor]:
    candidates = [loaded]
    if isinstance(loaded, Mapping):
        candidates += [loaded[key] for key in _WITHIN if key in loaded]
    for candidate in candidates:
        if isinstance(candidate, Mapping) and candidate and all(_is_entry(*item) for item in candidate.items()):
            return {name: value for name, value in candidate.items() if isinstance(value, torch.Tensor)}
    held = f"the keys {', '.join(map(str, list(loaded)[:6]))}" if isinstance(loaded, Mapping) else type(loaded).__name__
    raise ValueError(
        f"{path} holds {held}, where a state dict was expected: names and tensors, at the top or under one of "
        f"{', '.join(_WITHIN)}"
    )


def _is_entry(name: Any, value: Any) -> bool:
    """Whether `name` and `value` may be an entry of a state dict. Modules may put numbers beside their tensors."""
    return isinstance(name, str) and (isinstance(value, torch.Tensor | int | float) or name.endswith("_extra_state"))


def _without_wrappers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for prefix in (*_WRAPPERS, *_WRAPPERS):  # they may be nested in either order
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors
