"""Where files store the values of a model's tensors: mostly one tensor of the same name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn


class WeightFile(ABC, Mapping[str, torch.Tensor]):
    """The tensors of one file, by name. Each is read when it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def layout(self, name: str) -> torch.Tensor:
        """The tensor `name` on the meta device: its shape and dtype."""


@dataclass
class StoredWeights:
    """Where the values of a model's tensors are stored.

    Attributes:
        files: all files.
        made_of: for each of the model's names that the files have, a function that reads its tensor.
        unused: names in the files that the model has no place for.
    """

    files: list[WeightFile]
    made_of: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    layouts: dict[str, torch.Tensor] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def describe(self) -> list[tuple[str, int]]:
        """Names and sizes of the files. They are equal on ranks that read the same files."""
        return [(file.path.name, file.path.stat().st_size) for file in self.files]


def is_of_transformers(module: nn.Module) -> bool:
    """Whether `module` is a model of Hugging Face's transformers, or derived from one."""
    return any(base.__module__.startswith("transformers.") for base in type(module).__mro__)


def find_stored_weights(files: list[WeightFile], module: nn.Module) -> StoredWeights:
    """Finds where each tensor of `files` belongs in `module`, which is on the meta device.

    Models of transformers are matched by its own rules, which rename, fuse and split what older versions and other
    frameworks wrote. For other models the names must be the same; a common prefix on only one side is dropped.

    Raises:
        ValueError: a name occurs in two files, or a tensor has another shape than the model's.
    """
    where: dict[str, WeightFile] = {}
    for file in files:
        for name in file:
            if name in where:
                raise ValueError(
                    f"{name!r} is in {where[name].path.name} and in {file.path.name}; each tensor has one file"
                )
            where[name] = file
    wanted = module.state_dict(keep_vars=True)
    found = StoredWeights(files)
    if is_of_transformers(module):
        from tensorshard.weights.files.transformers_weights import match

        match(found, where, module)
    else:
        _match_names(found, where, wanted)
    wrong = [
        f"{name} has shape {tuple(found.layouts[name].shape)} in the files and {tuple(wanted[name].shape)} in the model"
        for name in found.made_of
        if found.layouts[name].shape != wanted[name].shape
    ]
    if wrong:
        more = f"; {len(wrong) - 3} more differ" if len(wrong) > 3 else ""
        raise ValueError(
            f"{files[0].path.parent} has the weights of another model than {type(module).__name__}: "
            f"{'; '.join(wrong[:3])}{more}. Give the model that they are of: from_pretrained(path, model=...)"
        )
    return found


def _match_names(found: StoredWeights, where: Mapping[str, WeightFile], wanted: Mapping[str, torch.Tensor]) -> None:
    renamed = _without_common_prefix(where, wanted)
    for name, file in where.items():
        target = renamed(name)
        if target not in wanted:
            found.unused.append(name)
            continue
        found.layouts[target] = file.layout(name)
        found.made_of[target] = partial(file.__getitem__, name)


def _without_common_prefix(stored: Iterable[str], wanted: Iterable[str]) -> Callable[[str], str]:
    """Turns stored names into the model's: they are the same, or longer or shorter by one module's name."""
    wanted, stored = set(wanted), set(stored)
    if not wanted & stored:
        for prefix in sorted({name.partition(".")[0] + "." for name in stored if "." in name}):
            if any(name.removeprefix(prefix) in wanted for name in stored if name.startswith(prefix)):
                return lambda name: name.removeprefix(prefix)
        for prefix in sorted({name.partition(".")[0] + "." for name in wanted if "." in name}):
            if any(prefix + name in wanted for name in stored):
                return lambda name: prefix + name
    return lambda name: name
