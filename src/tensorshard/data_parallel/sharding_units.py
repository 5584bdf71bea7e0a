"""Sharding units: which modules' parameters are gathered and reduced together."""

from collections.abc import Callable, Iterable

from torch import nn

from tensorshard.common.words import is_inside
from tensorshard.model.blocks import find_blocks, select_modules


def shard_units(model: nn.Module, requested: int | list[str] | None) -> list[list[nn.Module]]:
    """Lists of modules whose parameters are sent together, in the order of the model. All others form one more unit.

    Args:
        requested: as in :class:`tensorshard.Plan`: None, bytes of fp32 parameters, or names.
    """
    if isinstance(requested, list):
        return [[module] for module in _outermost(select_modules(model, requested)).values()]
    return _block_units(find_blocks(model).values(), requested)


def stage_shard_units(
    whole: nn.Module,
    stage: nn.Module,
    requested: int | list[str] | None,
    *,
    blocks: Iterable[nn.Module],
    units: Iterable[str],
) -> list[list[nn.Module]]:
    """The sharding units of a pipeline's stage, as :func:`shard_units` gives those of a model.

    A named module with layers on several stages makes one unit on each of them.

    Args:
        whole: the model.
        stage: the stage's modules, under the model's names.
        blocks: those of the model's blocks that are the stage's own.
        units: names of the modules that the stage calls as a whole.
    """
    if not isinstance(requested, list):
        return _block_units(blocks, requested)
    of_stage: list[list[nn.Module]] = []
    for name in _outermost(select_modules(whole, requested)):
        if is_inside(name, units):
            of_stage.append([stage.get_submodule(name)])
            continue
        within = [stage.get_submodule(unit) for unit in units if unit.startswith(f"{name}.")]
        if within:
            of_stage.append(within)
    return of_stage


def _block_units(blocks: Iterable[nn.Module], requested: int | None) -> list[list[nn.Module]]:
    single = [[block] for block in blocks]
    if requested is None:
        return single
    return _merge(single, lambda unit: 4 * sum(p.numel() for m in unit for p in m.parameters()), requested)


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in modules.items()
        if not any(name.startswith(f"{other}.") for other in modules if other != name)
    }


def _merge(
    units: list[list[nn.Module]], size_of: Callable[[list[nn.Module]], int], least: int
) -> list[list[nn.Module]]:
    """Joins neighbours until each unit has at least `least` bytes; a small rest joins the last."""
    merged: list[list[nn.Module]] = []
    current: list[nn.Module] = []
    for unit in units:
        current = current + unit
        if size_of(current) >= least:
            merged.append(current)
            current = []
    if current and merged:
        merged[-1] = merged[-1] + current
    elif current:
        merged.append(current)
    return merged
