"""Weights of Hugging Face's models, matched by the rules of transformers: names in files, and tensors in models.

A model may hold several tensors of a file as one (the experts of a mixture), or one as several.
transformers has rules for both ways. Each rule is applied to its own tensors, one rule after the other, so that no
other tensors are in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorshard.common.words import install_extra
from tensorshard.model.transformers_settings import is_of_transformers
from tensorshard.weights.files.stored_weights import StoredWeights, WeightFile


def match(stored: StoredWeights, where: Mapping[str, WeightFile], model: Any) -> None:
    """Fills `stored` with the tensors of `where` that `model`, a PreTrainedModel on the meta device, needs."""
    wanted = model.state_dict(keep_vars=True)
    rules = _Rules(model)
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(where, key=_natural):
        target, pattern = rules.rename(name, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target not in wanted:
            stored.unused.append(name)
        elif pattern is None:
            groups[target] = (None, [(name, name)])
        else:
            groups.setdefault(target, (rules.converter(pattern), []))[1].append((pattern, name))
    for target, (converter, sources) in groups.items():
        if converter is None:
            name = sources[0][1]
            stored.layouts[target] = where[name].layout(name)
            stored.made_of[target] = partial(where[name].__getitem__, name)
            continue
        conversion = _Conversion(target, converter, sources, where, model)
        for name, layout in conversion.run(lambda file, key: file.layout(key)).items():
            if name not in wanted:
                stored.unused.append(name)
                continue
            stored.layouts[name] = layout
            stored.made_of[name] = partial(conversion.read, name)


@dataclass(frozen=True)
class _Conversion:
    """One of transformers' rules, and the tensors in files that it applies to.

    Attributes:
        target: the first of the model's names that it makes.
        sources: for each tensor of a file, the rule's pattern that its name matches, and the name.
    """

    target: str
    converter: Any
    sources: list[tuple[str, str]]
    where: Mapping[str, WeightFile]
    model: Any

    def run(self, read: Callable[[WeightFile, str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that the rule makes of its sources, by the model's names."""
        rule = deepcopy(self.converter)
        for pattern, name in self.sources:
            rule.add_tensor(self.target, name, pattern, partial(read, self.where[name], name))
        made = rule.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.run(lambda file, key: file[key])[name]


class _Rules:
    """The names and tensors that transformers converts for one model."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        self._prefix = model.base_model_prefix
        self._rename: Callable[..., tuple[str, str | None]] = rename_source_key
        rules = get_model_conversion_mapping(model) or []
        self._converters: list[Any] = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._renamings: list[Any] = [rule for rule in rules if not isinstance(rule, WeightConverter)]

    def rename(self, name: str, wanted: Mapping[str, torch.Tensor]) -> tuple[str, str | None]:
        """The model's name for the file's `name`, and the pattern of the converter that takes it, if any."""
        return self._rename(name, self._renamings, self._converters, self._prefix, wanted)

    def converter(self, pattern: str) -> Any:
        return next(rule for rule in self._converters if pattern in rule.source_patterns)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which expert 10 comes after expert 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


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


def model_of(directory: Any) -> Callable[[], nn.Module]:
    """The constructor of the model that a directory's ``config.json`` describes.

    Raises:
        FileNotFoundError: there is no ``config.json``.
        ImportError: transformers is not installed.
        ValueError: transformers has no such model.
    """
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"{directory} has no config.json, which would say whose weights these are; give the model's constructor: "
            f"from_pretrained(path, model=...)"
        )
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{directory} has a config.json of Hugging Face's, for which transformers is needed: "
            f"{install_extra('hf')}; or give the model's constructor: from_pretrained(path, model=...)"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory}/config.json describes no model that transformers can read: {error}") from error
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        said = f"names {names[0]}, which transformers {transformers.__version__} does not have" if names else "names no"
        raise ValueError(
            f"{directory}/config.json {said} architecture; give the model's constructor, such as "
            f"from_pretrained(path, model=lambda: transformers.AutoModelForCausalLM.from_config(config))"
        )
    return lambda: _built(kind, config, directory)


def _built(kind: Any, config: Any, directory: Any) -> nn.Module:
    model = kind(deepcopy(config))
    if (directory / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model
