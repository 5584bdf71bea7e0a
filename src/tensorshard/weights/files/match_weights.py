"""Finds the tensors of files that each tensor of a model is made of; mostly one tensor of the same name."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import nn

from tensorshard.weights.files.stored_weights import StoredWeights, is_of_transformers
from tensorshard.weights.files.weight_file import WeightFile


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
