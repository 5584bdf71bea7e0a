"""The units of a model: modules that one pipeline stage computes as a whole."""

from collections.abc import Iterable

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from tensorshard.model.blocks import find_blocks, named_parts, select_modules
from tensorshard.torch_private.modules import DropoutBase, NormBase, own_parameters

# Where torch defines activations, pooling and upsampling.
_ON_ACTIVATIONS = {f"torch.nn.modules.{name}" for name in ("activation", "pixelshuffle", "pooling", "upsampling")}


def find_units(model: nn.Module, named: list[str] | None = None) -> dict[str, nn.Module]:
    """The modules that are computed by one stage each, by name, in registration order; none is inside of another.

    They are the blocks (see :func:`tensorshard.model.blocks.find_blocks`, or as `named`). Outside of blocks they are
    every module that holds parameters and has no submodule that does, every normalization, dropout, activation,
    pooling and upsampling of torch.nn. The rest is functional code and other modules without parameters, which every
    stage runs.

    Args:
        named: patterns of module names that are blocks instead, as in ``layers.*``.

    Raises:
        ValueError: a pattern that matches no module.
    """
    chosen = find_blocks(model) if named is None else select_modules(model, named)
    blocks = set(map(id, chosen.values())) - {id(model)}
    units: dict[str, nn.Module] = {}
    _collect(model, "", blocks, units, set())
    return units


def _collect(module: nn.Module, prefix: str, blocks: set[int], units: dict[str, nn.Module], seen: set[int]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if id(child) in seen:
            continue
        seen.add(id(child))
        if id(child) in blocks or _is_unit(child):
            units[path] = child
        else:
            _collect(child, f"{path}.", blocks, units, seen)


def _is_unit(module: nn.Module) -> bool:
    # Two stages must not compute different statistics, nor draw different masks, for the same value.
    if isinstance(module, NormBase) or (isinstance(module, DropoutBase) and module.p > 0):
        return True
    # All stages could run these, but each would read and write whole activations for results that it does not need.
    if any(base.__module__ in _ON_ACTIVATIONS for base in type(module).__mro__) and not _has_parameters([module]):
        return True
    if not own_parameters(module) and not is_parametrized(module):
        return False
    return not _has_parameters(named_parts(module).values())


def _has_parameters(modules: Iterable[nn.Module]) -> bool:
    return any(True for module in modules for _ in module.parameters())
