"""The model that a rank of a pipeline shows its user, with the names of the whole model; and what it refuses.

Refused are reads and hooks of what other ranks have. Everything is put on the instances, as plain functions: names,
classes and forwards of the modules stay as they are.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.model.transformers_settings import captures_output
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
        wrap_forward(self.model, Role.PIPELINE_STAGE, partial(_refuse_call, stages[0].called))
        for path in self.missing:
            if path.rpartition(".")[0] not in self.missing:
                wrap_forward(
                    self.model.get_submodule(path), Role.PIPELINE_STAGE, partial(_refuse_call, stages[0].not_here(path))
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
    tensors: dict[str, Any] = {}
    for module in modules:
        for name, tensor in kind(module).items():
            tensors.setdefault(name, tensor)
    return tensors


def _refuse_call(message: str, forward: Forward, /, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(message)


_LISTS = ("named_parameters", "named_buffers")
_HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)


class Access:
    """Who reads the modules now.

    Args:
        computes: says whether a stage computes, so that the model's own code reads them.

    Attributes:
        in_loss: whether the loss function runs, whose sums over parameters would lack those of other ranks.
        open_lists: the lists of parameters that are under way, each with its name and the names in it. Two at once are
            of a ``zip``.
    """

    def __init__(self, computes: Callable[[], bool]) -> None:
        self.computes = computes
        self.in_loss = False
        self.open_lists: list[tuple[str, frozenset[str]]] = []


def guard_modules(
    model: nn.Module,
    missing: Mapping[str, Callable[[], str]],
    access: Access,
    *,
    part: str,
    returns: nn.Module | None,
    last: str,
    around: Mapping[str, nn.Module],
    aliases: Mapping[str, str],
) -> None:
    """Makes modules of `model` that other ranks compute say so, and lists of parameters that would be incomplete.

    Args:
        missing: for each name of a module that this rank does not have, what errors say.
        access: asked at every read.
        part: what this rank has, for errors.
        returns: the model whose forward ends with the output, if this rank computes it.
        last: where that is computed, for errors.
        aliases: for every name of a parameter, its first one.
        around: by name, modules that are only shown: each stage of this rank runs a copy.
    """
    modules = every_module(model)
    held = {id(module) for path, module in modules.items() if path not in missing}
    foreign = {path: module for path, module in modules.items() if path in missing and id(module) not in held}
    for path, module in foreign.items():
        _guard_foreign(module, missing[path], access)
    for path, module in modules.items():
        if path not in missing and any(_within(other, path) for other in foreign):
            _guard_partly_held(module, f"engine.model{path and '.'}{path}", access, part)
        elif path not in missing and own_modules(module):
            _guard_lists(module, f"engine.model.{path}", access, part)
    for path, module in around.items():
        message = (
            f"engine.model{path and '.'}{path} is around modules of several stages, each of which runs it: register a "
            f"hook on it before parallelize, or on a module inside of it"
        )
        for name in _HOOKS:
            vars(module)[name] = partial(_refuse, message)
    if around:
        vars(model)["named_parameters"] = partial(_without_copies, model.named_parameters, aliases)
    if returns is not None and returns is not model:
        vars(model)["register_forward_hook"] = returns.register_forward_hook
    if returns is None:
        message = (
            f"a forward hook of the whole model would see its output, which is computed on {last}; this rank has "
            f"{part}. Register it before parallelize, which keeps it where the output is"
        )
        vars(model)["register_forward_hook"] = partial(_refuse, message)


def _within(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


def _guard_foreign(module: nn.Module, sentence: Callable[[], str], access: Access) -> None:
    own = vars(module)
    # A tied parameter keeps its first name, on stages that use it under another one, too.
    if not any(own_parameters(inner) for inner in every_module(module).values()):
        for name in _LISTS:
            own[name] = partial(_refuse_now, sentence)
        own["named_modules"] = partial(_no_modules, sentence)
        own["state_dict"] = partial(_state_dict, module, sentence)
        own["requires_grad_"] = partial(_requires_grad, module)
    hooked = f"{sentence().partition('. ')[0]}. A hook on it runs there: register it before parallelize, which keeps it"
    for name in _HOOKS:
        own[name] = partial(_hook_elsewhere, access, hooked, module, name)


def _guard_lists(module: nn.Module, shown: str, access: Access, part: str) -> None:
    """Guards the lists of a module that this rank has whole, which may be paired with others."""
    for name in _LISTS:
        vars(module)[name] = partial(_paired, getattr(type(module), name), module, access, f"{shown}.{name}()", part)


def _guard_partly_held(module: nn.Module, shown: str, access: Access, part: str) -> None:
    for name in _LISTS:
        message = (
            f"loss_fn lists {shown}.{name}(), but this rank has {part} alone, so a sum over it would lack the other "
            f"stages': for a penalty on the weights call engine.add_penalty(function), which runs on every stage and "
            f"sums, and leave it out of loss_fn"
        )
        call = f"{shown}.{name}()"
        vars(module)[name] = partial(_listed, getattr(type(module), name), module, access, message, call, part)


# Functions that stand in for a module's methods. A deep copy of a module keeps what they refer to.


def _refuse(message: str, /, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(message)


def _hook_elsewhere(
    access: Access, message: str, module: nn.Module, name: str, /, hook: Any, *args: Any, **kwargs: Any
) -> RemovableHandle:
    """Does nothing in the model's own forward, which registers the hook on the stage that has the module, too; but for
    hooks that collect what code of the model, which runs on all stages, computes with.

    Raises:
        RuntimeError: it is called from elsewhere.
    """
    if not access.computes():
        raise RuntimeError(message)
    if captures_output(hook):
        return getattr(type(module), name)(module, hook, *args, **kwargs)
    return RemovableHandle(OrderedDict())


def _listed(
    method: Callable[..., Iterator[Any]],
    module: nn.Module,
    access: Access,
    message: str,
    call: str,
    part: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Iterator[Any]:
    if access.in_loss:
        raise RuntimeError(message)
    return _paired(method, module, access, call, part, *args, **kwargs)


def _paired(
    method: Callable[..., Iterator[Any]],
    module: nn.Module,
    access: Access,
    call: str,
    part: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Iterator[Any]:
    return _one_by_one(method(module, *args, **kwargs), frozenset(n for n, _ in method(module)), access, call, part)


def _one_by_one(listed: Iterator[Any], names: frozenset[str], access: Access, call: str, part: str) -> Iterator[Any]:
    """The list; refuses to be paired with another one (as by ``zip``) that has other names."""
    for other, its_names in access.open_lists:
        if its_names != names:
            raise RuntimeError(
                f"{call} is listed within {other}, as by zip(), but this rank has {part} alone and other parts of the "
                f"one than of the other, so that parameters would be paired wrongly: pair them by name where a rank "
                f"has both (dict(module.named_parameters())), and let pp_split put both on one stage; or set pp=1"
            )
    entry = (call, names)
    access.open_lists.append(entry)
    try:
        yield from listed
    finally:
        access.open_lists.remove(entry)


def _refuse_now(sentence: Callable[[], str], /, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(sentence())


def _without_copies(
    listed: Callable[..., Iterator[Any]], aliases: Mapping[str, str], prefix: str = "", *args: Any, **kwargs: Any
) -> Iterator[Any]:
    """The list without tied parameters' copies on later stages of this rank."""
    before = f"{prefix}." if prefix else ""
    named = list(listed(prefix, *args, **kwargs))
    names = {name for name, _ in named}
    for name, parameter in named:
        own = name.removeprefix(before)
        first = before + aliases.get(own, own)
        if first == name or first not in names:
            yield name, parameter


def _no_modules(
    sentence: Callable[[], str], /, memo: Any = None, *_: Any, **__: Any
) -> Iterator[tuple[str, nn.Module]]:
    """Nothing in a list of the modules around it, which is of those that this rank has."""
    if memo is None:
        raise RuntimeError(sentence())
    return iter(())


def _state_dict(module: nn.Module, sentence: Callable[[], str], /, *args: Any, **kwargs: Any) -> Any:
    if not args and "destination" not in kwargs:
        raise RuntimeError(sentence())
    return type(module).state_dict(module, *args, **kwargs)


def _requires_grad(module: nn.Module, requires_grad: bool = True) -> nn.Module:
    """Does nothing: the rank that has the module does it, and a script says the same on all ranks."""
    return module
