"""Replacing layers inside a model by their parallel forms."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn

from tensorshard.distributed.ddp import register_ddp_parameters_to_ignore
from tensorshard.layers.parallel_module import ParallelModule
from tensorshard.torch_private.modules import own_parameters


def convert(
    module: nn.Module,
    plain: type[nn.Module],
    parallel: type[ParallelModule],
    names: Iterable[str] | None,
    build: Callable[[Any], ParallelModule],
) -> nn.Module:
    """Replaces the layers of class `plain` inside `module`.

    Args:
        module: changed in place, unless it is itself such a layer.
        parallel: the class of the layers that `build` makes.
        names: the layers to replace; ``*`` matches any characters, ``?`` one. None: all that are exactly of class
            `plain`.
        build: makes the replacement of one layer.

    Returns:
        `module`, or what replaces it.

    Raises:
        TypeError: `module` is not a module.
        ValueError: a name matches no such layer; a layer is parallel already; a parameter is tied to a module that is
            not converted. Nothing was changed then.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"a {type(module).__name__} was given where a model was expected, whose layers are to be replaced: give an "
            "nn.Module"
        )
    chosen = _choose(module, plain, parallel, names)
    _refuse_broken_ties(module, set(chosen))
    replacements: dict[int, ParallelModule] = {}
    shared: dict[int, nn.Parameter] = {}
    for name, layer in chosen.items():
        if id(layer) not in replacements:  # one layer may be used under several names
            replacements[id(layer)] = _build_tied(layer, build, shared)
        if name == "":
            return replacements[id(layer)]
        module.set_submodule(name, replacements[id(layer)])
    split = [layer for layer in replacements.values() if layer.dim is not None]
    if split and split[0].mesh.size() == dist.get_world_size():
        register_ddp_parameters_to_ignore(module)
    return module


def _choose(
    module: nn.Module, plain: type[nn.Module], parallel: type[ParallelModule], names: Iterable[str] | None
) -> dict[str, nn.Module]:
    """The layers to be replaced, by name."""
    modules = dict(module.named_modules(remove_duplicate=False))
    done = {name for name, m in modules.items() if isinstance(m, parallel) and m.dim is not None}
    if names is None:
        chosen = {name: m for name, m in modules.items() if type(m) is plain or _is_unsplit(m, parallel)}
        twice = done
    else:
        chosen, twice = {}, set()
        for pattern in [names] if isinstance(names, str) else names:
            matches = {name: m for name, m in modules.items() if fnmatchcase(name, pattern)}
            layers = {n: m for n, m in matches.items() if isinstance(m, plain) or _is_unsplit(m, parallel)}
            if not layers and not done & matches.keys():
                there = [n or "the module itself" for n, m in modules.items() if isinstance(m, plain)]
                raise ValueError(
                    f"{pattern!r} names no nn.{plain.__name__} of the model; it has: {', '.join(there) or 'none'}"
                )
            twice |= done & matches.keys()
            chosen |= layers
    if twice:
        raise ValueError(
            f"already converted: {', '.join(name or 'the module itself' for name in sorted(twice))}. A layer is "
            "converted once; to convert others of this model, give their names="
        )
    return chosen


def _is_unsplit(module: nn.Module, parallel: type[ParallelModule]) -> bool:
    return isinstance(module, parallel) and module.dim is None


def _refuse_broken_ties(module: nn.Module, chosen: set[str]) -> None:
    """Raises if a parameter of a chosen layer is also used by a module that stays as it is."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for module_name, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in own_parameters(owner).items():
            owners.setdefault(id(parameter), []).append((module_name, name))
    for users in owners.values():
        inside = [f"{m}.{p}" for m, p in users if m in chosen]
        outside = [f"{m}.{p}" for m, p in users if m not in chosen]
        if inside and outside:
            raise ValueError(
                f"{inside[0]} is tied to {outside[0]}, which is not converted: they would no longer be one "
                f"parameter. Leave {inside[0].rpartition('.')[0]} out by giving names=, or untie them first"
            )


def _build_tied(
    layer: nn.Module, build: Callable[[Any], ParallelModule], shared: dict[int, nn.Parameter]
) -> ParallelModule:
    """Builds the replacement of `layer`, with parameters that were tied before tied again."""
    replacement = build(layer)
    for name, parameter in layer.named_parameters(recurse=False):
        known = shared.setdefault(id(parameter), own_parameters(replacement)[name])
        setattr(replacement, name, known)
    return replacement
