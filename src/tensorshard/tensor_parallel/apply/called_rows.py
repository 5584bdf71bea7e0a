"""Checks that modules which read the weights of their layers directly also call their row layers.

Such code often has a second path, a fused kernel that reads the weights of all layers (Mamba's has, in training on
GPUs). That path would take this rank's part of a row layer for the whole weight, and no sum over the ranks would
follow.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.tensor_parallel.table.styles import Style
from tensorshard.torch_private.modules import own_parameters


def guard_rows(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Makes a module raise if it reads a slice of one layer's weight, and then does not call its row layers."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        children = {key: child for key, child in module.named_children() if f"{prefix}{key}" not in styles}
        read = [key for key, child in children.items() if _is_sliced(f"{prefix}{key}.", child, styles)]
        rows = {
            key: child
            for key, child in module.named_children()
            if (style := styles.get(prefix + key)) is not None and style.kind == "rowwise"
        }
        if read and rows:
            called: set[str] = set()
            for key, row in rows.items():
                row.register_forward_pre_hook(lambda *_, called=called, key=key: called.add(key))
            what = f"{name or 'the model'} ({type(module).__name__})"
            wrap_forward(module, Role.GUARDED_ROWS, partial(_forward, what, frozenset(rows), called))


def _is_sliced(prefix: str, module: nn.Module, styles: Mapping[str, Style]) -> bool:
    return any((style := styles.get(prefix + key)) and style.kind == "slice" for key in own_parameters(module))


def _forward(what: str, rows: frozenset[str], called: set[str], forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    called.clear()
    output = forward(*args, **kwargs)
    if missing := sorted(rows - called):
        raise RuntimeError(
            f"{what} did not call {', '.join(missing)}, of whose weight this rank has a part: it read the weight past "
            f"the layer, as fused kernels do, and its output would be wrong; switch such kernels off, or give a "
            f"tp_plan that leaves this module whole"
        )
    return output
