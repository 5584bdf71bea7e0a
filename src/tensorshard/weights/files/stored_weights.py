"""Files that hold the values of a model's tensors, whatever their format, and the configs that are beside them.

It brings none of torch's distributed checkpoints, which take long to import: training may never read any.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tensorshard.common.stores import fetched, open_store
from tensorshard.weights.files.manifest import MANIFEST, read_manifest

ADAPTERS = "adapters.json"
"""What a checkpoint of a model of peft says about its adapters."""

CONFIGS = ("config.json", "generation_config.json", ADAPTERS)
"""The files that describe a model of transformers."""


class WeightFile(ABC, Mapping[str, torch.Tensor]):
    """The tensors of one file, by name. Each is read when it is used."""

    def __init__(self, path: Path | str) -> None:
        self.path = path

    @property
    def folder(self) -> str:
        """Where the file is."""
        return str(self.path).rpartition("/")[0]

    @property
    def name(self) -> str:
        """The file's name there."""
        return str(self.path).rpartition("/")[2]

    @property
    def size(self) -> int:
        """The file's bytes."""
        return Path(self.path).stat().st_size

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
        return [(file.name, file.size) for file in self.files]


def is_checkpoint_url(place: Path | str) -> bool:
    """Whether `place` is the URL of a checkpoint. Not all of it may be there."""
    return isinstance(place, str) and open_store(place).size(MANIFEST) is not None


def local_configs(place: Path | str) -> Path:
    """A folder of this machine with the configs of transformers that are in the folder or checkpoint `place`."""
    if isinstance(place, Path):
        return place
    store = open_store(place)
    manifest = read_manifest(store)  # in a store, each save gives its files new names
    names = store.files() if manifest is None else list(manifest.files)
    return fetched(place, {name: plain for name in names for plain in CONFIGS if name.rpartition("-")[2] == plain})
