"""`from_pretrained`: a model whose initial weights are in files. Each rank reads what it needs of them."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.common.stores import local_or_url
from tensorshard.common.words import kind_of
from tensorshard.model.parameters import parameter_aliases
from tensorshard.model.transformers_settings import is_of_transformers
from tensorshard.weights.files.stored_weights import StoredWeights, WeightFile, local_configs
from tensorshard.weights.files.weight_files import on_this_machine
from tensorshard.weights.initial.source import TensorSource

logger = logging.getLogger("tensorshard")


@dataclass(frozen=True)
class PretrainedModel:
    """A model for :func:`tensorshard.parallelize` whose weights are in files. Made by :func:`from_pretrained`.

    Calling it builds the model with these weights in this process's memory, as for one device.

    Attributes:
        path: of the files.
        build: the model's constructor.
    """

    path: Path | str
    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        model = self.build()
        stored = _stored(self.path, model)
        _report_missing(model, stored, self.path)
        state = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, read in stored.made_of.items():
                state[name].copy_(read())
        return model

    def source(self, initial: TensorSource, group: dist.ProcessGroup) -> TensorSource:
        """The values in these files, for the model of `initial`. Values that the files lack are taken from `initial`.

        Args:
            group: all ranks. They must find the same files. A collective.

        Raises:
            ValueError: as :func:`from_pretrained`; or another rank found other files.
        """
        stored = _stored(self.path, initial.module)
        _check_same_files(stored, self.path, group)
        if group.rank() == 0:
            _report_missing(initial.module, stored, self.path)
        return _FileTensors(initial, stored)


@dataclass(frozen=True)
class ReadWhole:
    """A model whose constructor reads its weights from files itself, as a whole on each rank.

    Attributes:
        read: that constructor.
        build: makes the same model with new weights.
    """

    read: Callable[[], nn.Module]
    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.read()


def without_files(model: Any) -> Any:
    """The constructor of `model`, for what looks at shapes alone; `model` itself if its weights are in no files."""
    return model.build if isinstance(model, PretrainedModel | ReadWhole) else model


def from_pretrained(path: str | PathLike[str], model: Callable[[], nn.Module] | None = None) -> PretrainedModel:
    """A model for :func:`tensorshard.parallelize` that starts from weights in files, under any plan.

    Each rank reads what it keeps, one tensor at a time, from memory-mapped files. No process ever holds the model. The
    same files must be on every machine.

    Args:
        path: a directory as Hugging Face writes it (``model.safetensors``, or several files and an index); or a file:
            ``.safetensors``, or a state dict by ``torch.save``, which may be the entry ``"state_dict"`` or ``"model"``
            of a dict; or a checkpoint of :meth:`tensorshard.Engine.save`, or of DeepSpeed, FSDP, torchtitan,
            Accelerate, Megatron-Core or the Trainer of transformers, of which only the weights are taken.
            Pickles that could run code raise an error. Or a URL of one of these that fsspec knows, such as
            ``s3://bucket/model``: a checkpoint is read from there, and other files are copied to the folder of caches
            first (``~/.cache/tensorshard``), once per machine.
        model: builds the ``nn.Module`` that the weights are for. By default, the class of transformers that
            ``config.json`` names.

    Weights are cast to the dtype of the model's parameters. Tensors that the files lack, such as a new classifier,
    are initialised by the model's constructor. Tensors that the model lacks are left out. The log names both.

    Raises:
        FileNotFoundError: no weights, or no ``config.json`` and no `model`.
        ValueError: files that cannot be read; an architecture that transformers does not have. ``parallelize`` raises
            it for shapes that differ from the model's, or if no name is in common.

    Examples:
        >>> torch.save(torch.nn.Linear(16, 4).state_dict(), "weights.pt")
        >>> model = ts.from_pretrained("weights.pt", functools.partial(torch.nn.Linear, 16, 4))
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-5)
        >>> engine = ts.parallelize(model, ts.Plan(), optimizer=adamw, loss_fn=torch.nn.functional.mse_loss)
    """
    place = local_or_url(path, "a directory or a file of weights")
    if isinstance(place, str):
        place = on_this_machine(place)
    else:
        place = place.expanduser()
    if isinstance(place, Path) and not place.exists():
        raise FileNotFoundError(
            f"there is no file or directory {place}; a local one is needed, as nothing is downloaded. "
            f"huggingface_hub.snapshot_download(name) fetches one"
        )
    if model is None:
        from tensorshard.weights.files.transformers_weights import model_of

        configs = local_configs(place)
        model = model_of(configs if configs.is_dir() else configs.parent)
    elif not callable(model) or isinstance(model, nn.Module):
        raise TypeError(
            f"model is {kind_of(model)}; from_pretrained needs what builds it, such as a class or a lambda, so "
            f"that no rank holds all of it"
        )
    _open(place)  # unreadable files raise here, before a world is joined
    return PretrainedModel(place, model)


class _FileTensors(TensorSource):
    def __init__(self, initial: TensorSource, stored: StoredWeights) -> None:
        super().__init__(initial.module)
        self._initial = initial
        self._made_of = stored.made_of
        aliases = parameter_aliases(initial.module)
        # A tied weight may be stored by any of its names.
        stored_as = {aliases.get(name, name): name for name in reversed(list(stored.made_of))}
        self._stored_as = {name: stored_as[first] for name, first in aliases.items() if first in stored_as}

    def _value(self, name: str) -> torch.Tensor:
        stored = self._stored_as.get(name, name)
        if stored not in self._made_of:
            return self._initial.tensor(name)
        return self._made_of[stored]().to(self._layouts[name].dtype)


def _open(path: Path | str, module: nn.Module | None = None) -> list[WeightFile]:
    from tensorshard.weights.files.foreign.opening import open_weights  # which brings torch's checkpoints

    return open_weights(path, module)


def _stored(path: Path | str, module: nn.Module) -> StoredWeights:
    stored = _find_stored(_open(path, module), module)
    if not stored.made_of:
        raise ValueError(
            f"{path} has no weight of this {type(module).__name__}: its names are like "
            f"{', '.join(stored.unused[:3])}, the model's like {', '.join(list(module.state_dict())[:3])}"
        )
    return stored


def _find_stored(files: list[WeightFile], module: nn.Module) -> StoredWeights:
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
                raise ValueError(f"{name!r} is in {where[name].name} and in {file.name}; each tensor has one file")
            where[name] = file
    wanted = module.state_dict(keep_vars=True)
    stored = StoredWeights(files)
    if is_of_transformers(module):
        from tensorshard.weights.files.transformers_weights import match

        match(stored, where, module)
    else:
        _match_names(stored, where, wanted)
    wrong = [
        f"{name} has shape {tuple(layout.shape)} in the files and {tuple(wanted[name].shape)} in the model"
        for name, layout in stored.layouts.items()
        if layout.shape != wanted[name].shape
    ]
    if wrong:
        more = f"; {len(wrong) - 3} more differ" if len(wrong) > 3 else ""
        raise ValueError(
            f"{files[0].folder} has the weights of another model than {type(module).__name__}: "
            f"{'; '.join(wrong[:3])}{more}. Give the model that they are of: from_pretrained(path, model=...)"
        )
    return stored


def _match_names(stored: StoredWeights, where: Mapping[str, WeightFile], wanted: Mapping[str, torch.Tensor]) -> None:
    renamed = _without_common_prefix(where, wanted)
    for name, file in where.items():
        target = renamed(name)
        if target not in wanted:
            stored.unused.append(name)
            continue
        stored.layouts[target] = file.layout(name)
        stored.made_of[target] = partial(file.__getitem__, name)


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


def _check_same_files(stored: StoredWeights, path: Path | str, group: dist.ProcessGroup) -> None:
    files_of: list[Any] = [None] * group.size()
    dist.all_gather_object(files_of, stored.describe(), group=group)
    for rank, files in enumerate(files_of):
        if files != files_of[0]:
            raise ValueError(
                f"rank {rank} finds other files in {path} than rank 0: {_named(files)} there and {_named(files_of[0])} "
                f"on rank 0; every machine needs the same"
            )


def _named(files: list[tuple[str, int]]) -> str:
    return ", ".join(f"{name} ({size} bytes)" for name, size in files[:4])


def _report_missing(module: nn.Module, stored: StoredWeights, path: Path | str) -> None:
    aliases = parameter_aliases(module)
    given = {aliases.get(name, name) for name in stored.made_of}
    missing = [name for name in module.state_dict() if aliases.get(name, name) not in given]
    if missing:
        logger.warning("%s has no %s; the model's constructor initialises them", path, _listed(missing))
    if stored.unused:
        logger.warning("%s has %s, which the model does not have; not used", path, _listed(stored.unused))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
