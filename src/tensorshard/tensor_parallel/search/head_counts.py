"""Numbers of heads that the ranks cannot share evenly: the most common reason why an attention cannot be split."""

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from tensorshard.tensor_parallel.table.layer_kinds import as_splittable

# Words of names such as head_dim, which give the width of a head; and of names where head means something else.
_WIDTHS = ("dim", "size", "width")
_NEITHER = ("channel", "scale", "mask", "group")


def undivided_heads(block: nn.Module, layers: Iterable[str], size: int) -> str | None:
    """Says which heads of the modules that hold `layers` cannot be divided over `size` ranks, and which tp would work.

    Args:
        block: the names in `layers` are relative to it.

    Returns:
        None if there is no such number.
    """
    counts: dict[str, int] = {}
    by_layer: dict[str, int] = {}
    for layer in layers:
        owner = layer.rpartition(".")[0]
        named = _head_counts(owner, block.get_submodule(owner))
        counts |= named
        by_layer |= {} if named else _heads_of_layer(block, layer)
    wrong = [f"{name} is {count}" for name, count in counts.items() if count % size]
    for count in sorted({count for count in by_layer.values() if count % size}):
        those = [layer for layer, heads in by_layer.items() if heads == count]
        wrong.append(f"{', '.join(those)} {'has' if len(those) == 1 else 'have'} {count} heads")
    if not wrong:
        return None
    common = math.gcd(*counts.values(), *by_layer.values())
    ways = [str(ways) for ways in range(2, common + 1) if common % ways == 0]
    remedy = f"tp can be {' or '.join(ways)}" if ways else "no tp above 1 divides its heads"
    return f"{' and '.join(wrong)}, which cannot be divided over {size} ranks; {remedy}"


def _head_counts(name: str, module: nn.Module) -> dict[str, int]:
    own = _named_heads(vars(module))
    if not own:
        return {}  # not an attention; the heads in its config are those of other modules
    config = getattr(module, "config", None)
    known = own | {f"config.{key}": count for key, count in _named_heads(getattr(config, "__dict__", {})).items()}
    prefix = f"{name}." if name else ""
    return {prefix + key: count for key, count in known.items() if not any(p in key for p in (*_WIDTHS, *_NEITHER))}


def _heads_of_layer(block: nn.Module, layer: str) -> dict[str, int]:
    """The number of heads that a layer's output features show, if only the width of a head is known."""
    described = as_splittable(block.get_submodule(layer))
    owner = block.get_submodule(layer.rpartition(".")[0])
    widths = [w for key, w in _named_heads(vars(owner)).items() if any(part in key for part in _WIDTHS)]
    if described is None or described.kind != "linear" or len(widths) != 1 or described.outputs % widths[0]:
        return {}
    return {layer: described.outputs // widths[0]}


def _named_heads(attributes: dict[str, Any]) -> dict[str, int]:
    return {
        key: value
        for key, value in attributes.items()
        if "head" in key and isinstance(value, int) and not isinstance(value, bool) and value > 0
    }
