"""The adapters of peft in a checkpoint: their configs beside the weights, and the model made again of both."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorshard.common.words import install_extra
from tensorshard.model.parameters import buffer_aliases
from tensorshard.model.transformers_settings import is_of_peft
from tensorshard.torch_private.tensors import storage_address
from tensorshard.weights.files.checkpoint_files import CheckpointWeights
from tensorshard.weights.files.export import model_from_configs
from tensorshard.weights.files.stored_weights import ADAPTERS, local_configs


def write_adapter_configs(model: nn.Module, folder: Path) -> None:
    """Writes what the adapters of `model` are made by to ``adapters.json``; nothing if it is no model of peft."""
    if not is_of_peft(model):
        return
    peft_model: Any = model
    configs = {name: config.to_dict() for name, config in peft_model.peft_config.items()}
    document = {"active": list(peft_model.active_adapters), "configs": configs}
    (folder / ADAPTERS).write_text(json.dumps(document, default=sorted, indent=1), encoding="utf-8")


class AdaptedCheckpoint:
    """A checkpoint of a model of peft.

    Args:
        place: its folder or URL.

    Attributes:
        names: of its adapters.
        model: of peft, with these adapters, on the meta device.

    Raises:
        ImportError: peft is not installed.
        ValueError: the checkpoint does not describe the base model.
    """

    def __init__(self, place: Path | str) -> None:
        self._place = place
        described = json.loads((local_configs(place) / ADAPTERS).read_text(encoding="utf-8"))
        self.names: list[str] = list(described["configs"])
        self._active: list[str] = described["active"]
        base = model_from_configs(place)
        if base is None:
            raise ValueError(
                f"{place} has adapters of peft on a base that is no model of transformers, and that no file describes: "
                f"load it into an engine and call engine.save_pretrained(path, adapters_only=True), or merge what "
                f"engine.full_state_dict() returns"
            )
        self.model = _with_adapters(base, described["configs"])

    @staticmethod
    def is_at(place: Path | str) -> bool:
        """Whether the checkpoint at `place` is one of a model of peft."""
        return (local_configs(place) / ADAPTERS).is_file()

    def aliases(self, weights: CheckpointWeights) -> dict[str, str]:
        """For every name of a tensor that `weights` has by another name, that one."""
        return {**buffer_aliases(self.model), **weights.document.get("aliases", {})}

    def check_complete(self, weights: CheckpointWeights) -> None:
        """Refuses a checkpoint of what was trained where one of several adapters was frozen, and is not in it.

        Raises:
            ValueError: there is such an adapter.
        """
        aliases = self.aliases(weights)
        held = {name for name in self.model.state_dict() if aliases.get(name, name) in weights}
        for adapter in self.names:
            if not any(f".{adapter}." in f"{name}." for name in held):
                raise ValueError(
                    f"{self._place} has the trained parameters alone (engine.save(trained_only=True)), and not the "
                    f"adapter {adapter!r}, which was frozen: export a checkpoint of all weights"
                )

    def merged(self, weights: CheckpointWeights) -> nn.Module:
        """The base with the active adapters merged into its weights, as peft's ``merge_and_unload`` does, on the CPU.

        Args:
            weights: of the checkpoint. All of them are read.

        Raises:
            ValueError: the adapters cannot be merged, or the checkpoint has not all weights of such a model.
        """
        if not hasattr(self.model.base_model, "merge_and_unload"):
            kinds = ", ".join(str(_type(config)) for config in self.model.peft_config.values())
            raise ValueError(
                f"{self._place} has adapters of peft's type {kinds}, which are not added to weights, so they cannot be "
                f"merged: export it without merge=True, which writes the adapters"
            )
        aliases = self.aliases(weights)
        first = {name: aliases.get(name, name) for name in self.model.state_dict()}
        missing = [name for name, stored in first.items() if stored not in weights]
        if missing:
            raise ValueError(
                f"{self._place} lacks {len(missing)} weights of the model that it describes, such as {missing[0]}"
            )
        tensors = {stored: weights[stored] for stored in dict.fromkeys(first.values())}
        self.model.load_state_dict({name: tensors[stored] for name, stored in first.items()}, assign=True)
        del tensors
        self.model.base_model.set_adapter(self._active)
        merged: nn.Module = self.model.merge_and_unload()
        return merged


def tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each further name of a tensor, the first one. Tied parameters that were loaded are two, on one storage."""
    first: dict[tuple[Any, ...], str] = {}
    names = {
        name: first.setdefault((storage_address(t.untyped_storage()), t.storage_offset(), t.shape), name)
        for name, t in tensors.items()
    }
    return {name: other for name, other in names.items() if name != other}


def _with_adapters(base: nn.Module, configs: Mapping[str, Mapping[str, Any]]) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(
            f"the checkpoint has adapters of peft, which is not installed: {install_extra('adapters')}"
        ) from error
    model: Any = None
    for name, fields in configs.items():
        config: Any = peft.PeftConfig.from_peft_type(**fields)
        base.name_or_path = config.base_model_name_or_path or ""  # type: ignore[assignment]
        if not isinstance(getattr(config, "init_lora_weights", True), bool):
            config.init_lora_weights = True  # others compute with the weights of the base, in which they are by now
        if model is None:
            model = peft.get_peft_model(base, config, adapter_name=name, low_cpu_mem_usage=True)
        else:
            model.add_adapter(name, config, low_cpu_mem_usage=True)
    return model


def _type(config: Any) -> Any:
    return getattr(config.peft_type, "value", config.peft_type)
