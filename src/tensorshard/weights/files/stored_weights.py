"""Where files store the values of a model's tensors: mostly one tensor of the same name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
