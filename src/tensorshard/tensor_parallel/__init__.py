"""Tensor and sequence parallelism: the table, applying it, verifying it by numbers, searching for one."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
    from tensorshard.tensor_parallel.table.table import TensorPlan

__all__ = ["TensorPlan", "find_tensor_plan"]

# Imported on first use, so that the table, which is data, does not bring in the search.
_MODULES = {
    "TensorPlan": "tensorshard.tensor_parallel.table.table",
    "find_tensor_plan": "tensorshard.tensor_parallel.search.find_table",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
