"""Silent faults of the field, rebuilt small from their public reports."""

from benchmarks.museum import attention, data, experts, pipelines, sequences, tensor_parallel
from benchmarks.museum.exhibit import Exhibit

EXHIBITS: list[Exhibit] = [
    *tensor_parallel.EXHIBITS,
    *sequences.EXHIBITS,
    *attention.EXHIBITS,
    *experts.EXHIBITS,
    *pipelines.EXHIBITS,
    *data.EXHIBITS,
]
