"""How each kind of operation is done on sequence tensors."""

from tensorshard.context_parallel.rules import (
    attention,
    autograd,
    contractions,
    indexing,
    layers,
    pointwise,
    reductions,
    shapes,
)

__all__ = [
    "attention",
    "autograd",
    "contractions",
    "indexing",
    "layers",
    "pointwise",
    "reductions",
    "shapes",
]
