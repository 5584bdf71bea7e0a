"""If a found table is wrong for the model as a whole, this finds the largest part of it that is right.

Blocks are checked one by one. The model around them may do what no block shows: one block reads another's weights, or a
cache is filled once. Then parts of the table are tried together, the largest first.
"""

from collections.abc import Callable, Mapping

from torch import nn

from tensorshard.tensor_parallel.apply.apply_table import find_layouts
from tensorshard.tensor_parallel.search.check_table import CheckedPlan, WrongTableError
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.table import TensorTable, collapse

# If a table has more parts than this, those with the fewest weights are left out untried.
_MOST_TRIES = 12


def largest_part(
    model: nn.Module,
    styles: Mapping[str, Style],
    part_of: Mapping[str, str],
    size: int,
    check: Callable[[TensorTable], CheckedPlan],
    error: WrongTableError,
) -> tuple[CheckedPlan, dict[str, str]]:
    """The largest part of a table that passes a check, and why the rest of its entries stay whole.

    Args:
        styles: the table, which did not pass.
        part_of: for each name, the part that it belongs to, if it shares one. A part is kept or dropped as a whole.
        size: number of ranks.
        check: checks a table.
        error: what the check raised for `styles`.

    Raises:
        WrongTableError: no part passes. This is `error` itself.
    """
    parts: dict[str, dict[str, Style]] = {}
    for name, style in styles.items():
        parts.setdefault(part_of.get(name, name), {})[name] = style
    weights = {part: _split_elements(model, table, size) for part, table in parts.items()}
    taken: dict[str, Style] = {}
    found: CheckedPlan | None = None
    left_out: dict[str, str] = {}
    for tries, part in enumerate(sorted(parts, key=lambda part: -weights[part])):
        reason = _reason(error)
        if tries < _MOST_TRIES and len(parts) > 1:
            try:
                found = check(collapse({**taken, **parts[part]}, model))
                taken.update(parts[part])
                continue
            except WrongTableError as refused:
                reason = _reason(refused)
        left_out.update(dict.fromkeys(parts[part], f"the model around it does not compute the same: {reason}"))
    if found is None:
        raise error
    return found, left_out


def _reason(error: WrongTableError) -> str:
    return (str(error).partition("although its blocks do: ")[2] or str(error)).splitlines()[0]


def _split_elements(model: nn.Module, table: dict[str, Style], size: int) -> int:
    layouts = find_layouts(model, collapse(table, model).resolve(model), size)
    return sum(p.numel() for name, p in model.named_parameters() if layouts[name].dim is not None)
