"""The folders of a peft model: its adapters alone, as peft's own ``save_pretrained`` writes them, and read again.

peft is imported only for a model that is made of it. It chooses and names the tensors, on a copy of the model without
values; the values are gathered one at a time. Prompts are computed by their encoder, which gets its values for that.

A base model of transformers that was loaded from nowhere is written beside its adapters: the folder then opens by
transformers' ``from_pretrained`` alone.
"""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tensorshard.common.words import kind_of
from tensorshard.model.parameters import STATISTICS, keeps_statistics
from tensorshard.model.transformers_settings import is_of_peft, is_of_transformers
from tensorshard.torch_private.modules import own_parameters, set_buffer, set_parameter, without_values
from tensorshard.weights.files.export import MAX_SHARD_SIZE, Export, check_arguments, weights_folder

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WRAPPERS = (".base_layer.", ".original_module.")  # around what the base model has, in names
_PROMPTS = "prompt_embeddings"  # the name in the file of what a prompt's encoder computes
_OTHER_PROMPTS = frozenset({"MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE"})  # files with more
# Fields of a config that do not say what its adapter computes, or that the names and shapes of its tensors tell.
_OTHER_FIELDS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern",
        "layers_to_transform", "lora_bias", "modules_to_save", "peft_version", "revision", "runtime_config",
        "save_projection", "target_modules", "target_parameters", "task_type", "tokenizer_name_or_path",
    }
)  # fmt: skip
_INSTEAD = (
    "for all weights of the model there is engine.full_state_dict(): load it on one process into the same model, and "
    "call its save_pretrained there"
)


def has_adapters(model: nn.Module) -> bool:
    """Whether only the adapters of `model` are to be written: it is a model of peft.

    Raises:
        ValueError: it has adapters, but neither peft nor transformers would open what could be written.
    """
    if is_of_peft(model):
        return True
    kind = next((base.__name__ for base in type(model).__mro__ if base.__module__.startswith("peft.")), None)
    inner = next((name for name, m in model.named_modules() if _is_layer_of_peft(m)), None)
    if kind is not None:
        raise ValueError(f"engine.save_pretrained was called for a {kind}, which peft itself cannot save; {_INSTEAD}")
    if inner is not None and is_of_transformers(model):
        raise ValueError(
            f"engine.save_pretrained was called for {kind_of(model)} into which peft injected the layer "
            f"{inner!r} without a PeftModel around it, so that its weights have names that transformers does not open: "
            f"make it by peft.get_peft_model(model, config); {_INSTEAD}"
        )
    return False


class AdapterExport:
    """A directory of adapters that is being written. It gets its own name when it is complete.

    Args:
        directory: the path, or a URL.
        structure: the model of peft.
        layouts: for each name, tied ones once, a tensor of its shape and dtype on the meta device.
        aliases: for every name of a parameter, the one in `layouts`.
        is_trained: whether the parameter of a name was trained.
        adapters_only: whether a base model that was loaded from nowhere is left out, too.
        dtype: of floating-point tensors in the files; None to keep their own.
        max_shard_size: largest size of a file, in bytes or as text such as "5GB".
        overwrite: whether an older directory of weights is replaced, once this one is complete.

    Attributes:
        needed: the names of the tensors that the adapters' files are made of.

    Raises:
        FileExistsError: the directory is there, and must not be replaced.
        ValueError: something that is trained would not be in the files, or peft would compute what it writes.
    """

    def __init__(
        self,
        directory: Path | str,
        structure: nn.Module,
        layouts: Mapping[str, torch.Tensor],
        aliases: Mapping[str, str],
        is_trained: Callable[[str], bool],
        *,
        adapters_only: bool = False,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        overwrite: bool = False,
    ) -> None:
        max_bytes = check_arguments(dtype, max_shard_size)
        self._folder = weights_folder(directory, overwrite=overwrite)
        self._dtype = dtype
        self._adapters = _Adapters(structure, layouts, aliases)
        self._model, self._names = self._adapters.model, self._adapters.names
        self._stored = self._adapters.stored
        self.needed = {first for names in self._stored.values() for first in names.values()}
        self._values: dict[str, torch.Tensor] = {}
        self._check_complete(structure, layouts, is_trained)
        for adapter, names in self._stored.items():
            size = sum(layouts[first].numel() * (dtype or layouts[first].dtype).itemsize for first in names.values())
            if size > max_bytes:
                raise ValueError(
                    f"max_shard_size is {max_bytes} bytes, but peft reads an adapter from one file, and that of "
                    f"{adapter!r} has {size} bytes; give at least that size"
                )
        self._temporary = self._folder.begin()
        self._base_names = {} if adapters_only else self._names_of_base(layouts)
        base_layouts = {base: layouts[first] for first, base in self._base_names.items()}
        self._base = (
            Export(
                self._temporary / "base", self._plain_base(), base_layouts, dtype=dtype, max_shard_size=max_shard_size
            )
            if base_layouts
            else None
        )

    def _plain_base(self) -> nn.Module:
        base = self._model.get_base_model()
        with torch.device("meta"):
            return type(base)(deepcopy(base.config))

    def _names_of_base(self, layouts: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The names of the base model's tensors, by those in `layouts`, if it has to be written; else nothing."""
        base = self._model.get_base_model()
        named = any(config.base_model_name_or_path for config in self._model.peft_config.values())
        if named or getattr(base, "name_or_path", None) or not is_of_transformers(base):
            return {}
        names: dict[str, str] = {}
        prefix = next(f"{name}." for name, module in self._model.named_modules() if module is base)
        for name, first in self._names.items():
            plain = name.removeprefix(prefix)
            for wrapper in _WRAPPERS:
                plain = plain.replace(wrapper, ".")
            names.setdefault(plain, first)
        expected = {name: tensor.shape for name, tensor in self._plain_base().state_dict().items()}
        if any(name not in names or layouts[names[name]].shape != shape for name, shape in expected.items()):
            return {}  # a base model that its config does not describe
        return {names[name]: name for name in reversed(expected)}

    def _check_complete(
        self, structure: nn.Module, layouts: Mapping[str, torch.Tensor], is_trained: Callable[[str], bool]
    ) -> None:
        parameters = {self._names.get(name, name) for name, _ in structure.named_parameters()}
        lost = [name for name in layouts if name in parameters and is_trained(name) and name not in self.needed]
        if lost:
            raise ValueError(
                f"engine.save_pretrained writes a peft model's adapters, but {len(lost)} parameters are trained beside "
                f"them, such as {lost[0]!r}, and would be lost: name their modules in the peft config's "
                f"modules_to_save; {_INSTEAD}"
            )
        for path, module in structure.named_modules():
            statistics = [f"{path}.{name}" for name in STATISTICS]
            changes = module.training and keeps_statistics(module) and statistics[0] in layouts
            if changes and not self.needed.issuperset(statistics):
                raise ValueError(
                    f"engine.save_pretrained writes a peft model's adapters, but the statistics of {path!r} "
                    f"({type(module).__name__}) change in training, and would be lost: name it in the peft config's "
                    f"modules_to_save, or train with that module in evaluation mode; {_INSTEAD}"
                )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps one tensor, by the model's name, if an adapter needs it."""
        if self._base is not None and name in self._base_names:
            self._base.add(self._base_names[name], tensor)
        if name in self.needed:
            kept = tensor.detach().to("cpu", copy=True)
            self._values[name] = kept.to(self._dtype) if self._dtype and kept.is_floating_point() else kept

    def finish(self) -> None:
        """Writes the files, and gives the directory its name."""
        state = {name: self._values[first] for name, first in self._names.items() if first in self._values}
        for adapter in self._adapters.prompts:
            for name in self._stored[adapter]:
                path, _, key = name.rpartition(".")
                owner = self._model.get_submodule(path)
                if key in own_parameters(owner):
                    set_parameter(owner, key, nn.Parameter(state[name], requires_grad=False))
                else:
                    set_buffer(owner, key, state[name])
        self._model.save_pretrained(str(self._temporary), state_dict=state)
        if self._base is not None:
            self._base.finish()
            for file in (self._temporary / "base").iterdir():
                file.rename(self._temporary / file.name)
            (self._temporary / "base").rmdir()
        self._check_written()
        self._folder.finish()

    def _check_written(self) -> None:
        """Raises RuntimeError if a file has not the names that were chosen: it would open in part."""
        from safetensors import safe_open

        for adapter, names in self._stored.items():
            folder = self._temporary / adapter if adapter != "default" else self._temporary
            json.loads((folder / _CONFIG).read_text())
            with safe_open(folder / _WEIGHTS, "pt") as file:
                written = set(file.keys())
            if written != ({_PROMPTS} if adapter in self._adapters.prompts else set(names)):
                raise RuntimeError(f"peft wrote other tensors of the adapter {adapter!r} than it had chosen before")

    def discard(self) -> None:
        """Removes what was written."""
        self._folder.discard()


class _Adapters:
    """Which tensors of a model of peft its adapters' files have.

    Attributes:
        model: a copy without values.
        names: for every name in the model's state dict, the first of that tensor.
        stored: for each adapter, by the names in its file, the model's; of a prompt's encoder by the model's own names.
        prompts: the adapters whose file has what their encoder computes.

    Raises:
        ValueError: peft computes another file from the weights.
    """

    def __init__(self, structure: nn.Module, layouts: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> None:
        self.model = model = cast(Any, without_values(structure))
        self.names = {
            n: aliases.get(n, n) for n in structure.state_dict(keep_vars=True) if aliases.get(n, n) in layouts
        }
        configs = model.peft_config.items()
        self.prompts = {adapter for adapter, config in configs if getattr(config, "is_prompt_learning", False)}
        self.stored = self._chosen({name: layouts[first] for name, first in self.names.items()})

    def _chosen(self, state: dict[str, torch.Tensor]) -> dict[str, dict[str, str]]:
        from peft import get_peft_model_state_dict

        by_id = {id(tensor): self.names[name] for name, tensor in state.items()}
        stored: dict[str, dict[str, str]] = {}
        for adapter, config in self.model.peft_config.items():
            if adapter in self.prompts:
                prefix = _prompt_prefix(adapter)
                stored[adapter] = {name: first for name, first in self.names.items() if name.startswith(prefix)}
                if getattr(config.peft_type, "value", config.peft_type) in _OTHER_PROMPTS:
                    self._refuse_computed(adapter, config)
                continue
            chosen = get_peft_model_state_dict(self.model, state_dict=state, adapter_name=adapter)
            if any(id(tensor) not in by_id for tensor in chosen.values()) or not chosen:
                self._refuse_computed(adapter, config)
            stored[adapter] = {name: by_id[id(tensor)] for name, tensor in chosen.items()}
        return stored

    def _refuse_computed(self, adapter: str, config: Any) -> None:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ValueError(
            f"engine.save_pretrained cannot write the adapter {adapter!r} of peft's type {kind}, whose file is "
            f"computed from the weights; {_INSTEAD}"
        )


def read_adapters(
    directory: Path, structure: nn.Module, layouts: Mapping[str, torch.Tensor], aliases: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The values of the adapters that are in `directory`, as peft writes them, by the model's names.

    Args:
        directory: has the adapter "default", and others in folders of their names.
        structure: the model of peft, which has these adapters.
        layouts: for each name, tied ones once, a tensor of its shape on the meta device.
        aliases: for every name of a parameter, the one in `layouts`.

    Raises:
        FileNotFoundError: none of the model's adapters is in `directory`.
        ValueError: the model is not one of peft, or an adapter there is another than the model's.
    """
    if not is_of_peft(structure):
        raise ValueError(
            f"engine.load_adapters was called for {kind_of(structure)}, which has no adapters of peft: make it by "
            f"peft.get_peft_model(model, config) before parallelize, with the config peft.PeftConfig.from_pretrained"
            f"({str(directory)!r})"
        )
    from safetensors.torch import load_file

    adapters = _Adapters(structure, layouts, aliases)
    folders = {a: directory / a if a != "default" else directory for a in adapters.stored}
    existing_folders = {adapter: folder for adapter, folder in folders.items() if (folder / _WEIGHTS).is_file()}
    if not existing_folders:
        looked = ", ".join(str(folder / _WEIGHTS) for folder in folders.values())
        raise FileNotFoundError(f"there is no file {looked}, for the adapters {', '.join(map(repr, folders))} here")
    values: dict[str, torch.Tensor] = {}
    for adapter, folder in existing_folders.items():
        names, tensors = adapters.stored[adapter], load_file(folder / _WEIGHTS)
        if adapter in adapters.prompts:
            names = {_PROMPTS: names[f"{_prompt_prefix(adapter)}embedding.weight"]}
        _check_config(adapter, adapters.model.peft_config[adapter], folder)
        if names.keys() != tensors.keys():
            odd = min(names.keys() ^ tensors.keys())
            where = "the file" if odd in tensors else "the model"
            raise ValueError(
                f"{folder / _WEIGHTS} is of another adapter than {adapter!r} of this model: only {where} has {odd}"
            )
        for name, first in names.items():
            if tensors[name].shape != layouts[first].shape:
                raise ValueError(
                    f"{folder / _WEIGHTS} is of another adapter than {adapter!r} of this model: {name} has shape "
                    f"{tuple(tensors[name].shape)} in the file and {tuple(layouts[first].shape)} in the model"
                )
            values[first] = tensors[name]
    return values


def _check_config(adapter: str, config: Any, folder: Path) -> None:
    """Raises ValueError if the adapter in `folder` computes something else with the same tensors."""
    there = json.loads((folder / _CONFIG).read_text())
    here = json.loads(json.dumps(config.to_dict(), default=sorted))
    for field in sorted(there.keys() & here.keys() - _OTHER_FIELDS):
        if there[field] != here[field] and not field.startswith("init") and "dropout" not in field:
            raise ValueError(
                f"{folder / _CONFIG} has {field}={there[field]!r}, and the adapter {adapter!r} of this model "
                f"{here[field]!r}: make the model with peft.PeftConfig.from_pretrained({str(folder)!r})"
            )


def _prompt_prefix(adapter: str) -> str:
    return f"prompt_encoder.{adapter}."


def _is_layer_of_peft(module: nn.Module) -> bool:
    return any(
        base.__name__ == "BaseTunerLayer" and base.__module__.startswith("peft.") for base in type(module).__mro__
    )
