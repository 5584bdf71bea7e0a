"""Silent faults of the field, rebuilt small from their public reports."""

from benchmarks.museum import copies, counts, optimizers, reductions, shards, steps, tied_weights
from benchmarks.museum.exhibit import Exhibit

EXHIBITS: list[Exhibit] = [
    *counts.EXHIBITS,
    *reductions.EXHIBITS,
    *copies.EXHIBITS,
    *tied_weights.EXHIBITS,
    *shards.EXHIBITS,
    *optimizers.EXHIBITS,
    *steps.EXHIBITS,
]
