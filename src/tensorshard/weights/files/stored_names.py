"""The names and forms in which files store a model's tensors. This is the reverse of reading them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tensorshard.weights.files.stored_weights import is_of_transformers


class StoredNames:
    """How the tensors of `model` are stored: in groups of one tensor, or of several that a file stores differently.

    Args:
        model: only its structure and config matter, not its values.
        layouts: a tensor on the meta device for each name that is to be stored, tied ones once.
    """

    def __init__(self, model: nn.Module | None, layouts: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._convert = _converter(model)
        self._groups = _groups(model, layouts)
        self._group_of = {name: group for group in self._groups for name in group}
        self._waiting: dict[str, torch.Tensor] = {}
        self.layouts: dict[str, torch.Tensor] = {}
        for group in self._groups:
            self.layouts.update(self._convert({name: layouts[name] for name in group}))

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that can be stored now that `tensor` is known, by their names in files."""
        group = self._group_of.get(name)
        if group is None:
            return
        if len(group) > 1:
            self._waiting[name] = tensor.detach().to("cpu", copy=True)
            if any(other not in self._waiting for other in group):
                return
            yield from self._convert({other: self._waiting.pop(other) for other in group}).items()
        else:
            yield from self._convert({name: tensor}).items()


def _groups(model: Any, layouts: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Names that are stored together, since one of transformers' rules takes them together."""
    if model is None or not is_of_transformers(model):
        return [(name,) for name in layouts]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_converters

    rules = [r for r in get_model_conversion_mapping(model, add_legacy=False)[::-1] if isinstance(r, WeightConverter)]
    reverse: list[Any] = [rule.reverse_transform() for rule in rules]
    groups: dict[str, list[str]] = {}
    for name in layouts:
        groups.setdefault(apply_converters(name, reverse)[0], []).append(name)
    return [tuple(names) for names in groups.values()]


def _converter(model: Any) -> Any:
    if model is None or not is_of_transformers(model):
        return dict
    from transformers.core_model_loading import revert_weight_conversion

    return lambda tensors: revert_weight_conversion(model, tensors)
