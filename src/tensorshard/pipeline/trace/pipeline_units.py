"""What of a model is called as a whole by a pipeline stage: its units."""

from torch import nn

from tensorshard.modules.blocks import find_blocks, select_modules
from tensorshard.torch_private.modules import DropoutBase, own_parameters


def find_units(model: nn.Module, named: list[str] | None = None) -> dict[str, nn.Module]:
    """The modules that are computed by one stage each, by name, in registration order; none is inside of another.

    They are the blocks (see :func:`tensorshard.modules.blocks.find_blocks`, or as `named`), and outside of them every
    leaf that holds parameters or draws random numbers. What is left is functional code and modules without parameters,
    which every stage runs for itself.

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
        if id(child) in blocks or _is_unit_leaf(child):
            units[path] = child
        else:
            _collect(child, f"{path}.", blocks, units, seen)


def _is_unit_leaf(module: nn.Module) -> bool:
    if any(True for _ in module.children()):
        return False
    if own_parameters(module):
        return True
    # Two stages must not draw different masks for one value.
    return isinstance(module, DropoutBase) and module.p > 0
