"""Tensor-parallel plans: the table of styles, the search for one, and its check by numbers."""

from tensorshard.tensor_plans.layout import Layout, join_parts, local_part
from tensorshard.tensor_plans.styles import STYLES, Style
from tensorshard.tensor_plans.table import TensorPlan

__all__ = ["STYLES", "Layout", "Style", "TensorPlan", "join_parts", "local_part"]
