"""The model that a rank of a pipeline shows its user: the user's own class, with the names of the whole model."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.pipeline.run.stage_module import StageModule
from tensorshard.pipeline.run.stage_skeleton import put_placeholders, skeleton
from tensorshard.torch_private.modules import (
    clear_hooks,
    every_module,
    own_buffers,
    own_modules,
    own_parameters,
    set_buffer,
    set_parameter,
)


class ShownModel:
    """One model of all stages that a rank has.

    With one stage it is the stage's own. Several stages are copies of the model that hold different units. They are put
    together here: each unit is that of its stage, and the modules around them show the stages' parameters.

    Args:
        whole: the model, on the meta device.

    Attributes:
        model: the model.
        missing: names of the modules that this rank does not compute.
        around: by name, modules that are only shown, around those of several stages.
    """

    def __init__(self, whole: nn.Module, stages: Sequence[StageModule]) -> None:
        self.missing = frozenset.intersection(*(stage.elsewhere for stage in stages))
        self.around: dict[str, nn.Module] = {}
        self._copies: list[tuple[nn.Module, list[nn.Module]]] = []  # a module, and the stages' modules of its name
        if len(stages) == 1:
            self.model = stages[0].module
            return
        self.model, removed = skeleton(whole, frozenset(), {""})
        of_stages = [every_module(stage.module) for stage in stages]
        units = {
            id(self.model.get_submodule(name)): unit for stage in reversed(stages) for name, unit in stage.units.items()
        }
        for module in every_module(self.model).values():
            for name, inner in own_modules(module).items():
                if id(inner) in units:
                    own_modules(module)[name] = units[id(inner)]
        for path, module in every_module(self.model).items():
            same = [modules[path] for modules in of_stages if path in modules]
            self._copies.append((module, [other for other in same if other is not module]))
            if any(other is module for other in same):
                continue
            clear_hooks(module)
            if path not in self.missing:
                self.around[path] = module
            for name, parameter in _first(own_parameters, same).items():
                vars(module).pop(name, None)
                set_parameter(module, name, parameter)  # type: ignore[arg-type]
            for name, buffer in _first(own_buffers, reversed(same)).items():  # the last stage makes all changes
                vars(module).pop(name, None)
                set_buffer(module, name, buffer)
        placed = [each for each in removed if each.name in vars(each.owner)]
        device = next((p.device for stage in stages for p in stage.module.parameters()), torch.device("cpu"))
        put_placeholders(placed, device, computes=lambda: False, sentence=stages[0].not_held)
        wrap_forward(self.model, Role.PIPELINE_STAGE, partial(_refuse, stages[0].called))
        for path in self.missing:
            if path.rpartition(".")[0] not in self.missing:
                wrap_forward(
                    self.model.get_submodule(path), Role.PIPELINE_STAGE, partial(_refuse, stages[0].not_here(path))
                )

    def follow_modes(self) -> None:
        """Gives the stages' modules the modes (training, evaluation) and frozen parameters of those that are shown."""
        for module, copies in self._copies:
            shown = own_parameters(module)
            for copy in copies:
                copy.training = module.training
                for name, parameter in own_parameters(copy).items():
                    if name in shown and parameter.requires_grad != shown[name].requires_grad:
                        parameter.requires_grad_(shown[name].requires_grad)


def _first(kind: Callable[[nn.Module], dict[str, Any]], modules: Iterable[nn.Module]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in modules:
        for name, tensor in kind(module).items():
            found.setdefault(name, tensor)
    return found


def _refuse(message: str, forward: Forward, /, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(message)
