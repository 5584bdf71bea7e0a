"""Where the values of a model's tensors are, in files."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from tensorshard.pretrained.weight_file import WeightFile


@dataclass
class StoredWeights:
    """Where the values of a model's tensors are.

    Attributes:
        files: all of them.
        made_of: for each name of the model's that the files have: how to read it.
        unused: names in the files that the model has no place for.
    """

    files: list[WeightFile]
    made_of: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    layouts: dict[str, torch.Tensor] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def describe(self) -> list[tuple[str, int]]:
        """Names and sizes of the files: the same on ranks that read the same."""
        return [(file.path.name, file.path.stat().st_size) for file in self.files]


def is_of_transformers(module: nn.Module) -> bool:
    """Whether `module` is a model of Hugging Face's transformers, or derived from one."""
    return any(base.__module__.startswith("transformers.") for base in type(module).__mro__)
