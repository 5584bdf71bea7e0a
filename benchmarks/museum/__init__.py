"""Silent faults of the field, rebuilt small from their public reports."""

from benchmarks.museum import (
    attention,
    copies,
    counts,
    data,
    experts,
    optimizers,
    pipelines,
    reductions,
    sequences,
    shards,
    steps,
    tensor_parallel,
    tied_weights,
)
from benchmarks.museum.exhibit import Exhibit

EXHIBITS: list[Exhibit] = [
    *counts.EXHIBITS,
    *reductions.EXHIBITS,
    *copies.EXHIBITS,
    *tied_weights.EXHIBITS,
    *shards.EXHIBITS,
    *optimizers.EXHIBITS,
    *steps.EXHIBITS,
    *tensor_parallel.EXHIBITS,
    *sequences.EXHIBITS,
    *attention.EXHIBITS,
    *experts.EXHIBITS,
    *pipelines.EXHIBITS,
    *data.EXHIBITS,
]
