"""The interface of a file of weights, for every format."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch


class WeightFile(ABC, Mapping[str, torch.Tensor]):
    """The tensors of one file, by name. Each is read when it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def layout(self, name: str) -> torch.Tensor:
        """The tensor `name` on the meta device: its shape and dtype."""
