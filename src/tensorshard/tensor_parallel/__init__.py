"""Tensor and sequence parallelism: the table, applying it, verifying it by numbers, searching for one."""

from typing import TYPE_CHECKING

from tensorshard.common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
    from tensorshard.tensor_parallel.table.table import TensorPlan, TensorTable

__all__ = ["TensorPlan", "TensorTable", "find_tensor_plan"]

# Imported on first use, so that the table, which is data, does not bring in the search.
__getattr__ = lazy_imports(
    __name__,
    {
        "TensorPlan": "tensorshard.tensor_parallel.table.table",
        "TensorTable": "tensorshard.tensor_parallel.table.table",
        "find_tensor_plan": "tensorshard.tensor_parallel.search.find_table",
    },
)
