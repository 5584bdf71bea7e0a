"""The collectives of a step along the data axes, by the rules with which the Engine packs gradients and weights."""

from collections.abc import Iterator, Sequence

from torch import nn

from tensorshard.comm.collectives import is_sent_whole
from tensorshard.data_parallel.reduction import ALONE_BYTES
from tensorshard.data_parallel.shard_units import shard_units
from tensorshard.plan.plan import Plan

Bucket = tuple[tuple[int, int], ...]
"""Rows and elements of each trained parameter of one bucket: parameters that may share a message."""


def find_buckets(model: nn.Module, requested: int | list[str] | None) -> list[Bucket]:
    """A bucket for each sharding unit, and one each for the parameters before and after all units.

    Args:
        requested: as ``Plan(shard_units=...)``.
    """
    of_unit: dict[int, int] = {}
    units = shard_units(model, requested)
    for index, unit in enumerate(units):
        for module in unit:
            for parameter in module.parameters():
                of_unit.setdefault(id(parameter), index)
    members: dict[int, list[tuple[int, int]]] = {}
    begun = False
    for parameter in model.parameters():
        if parameter.requires_grad:
            begun = begun or id(parameter) in of_unit
            rows = parameter.size(0) if parameter.dim() else 1
            index = of_unit.get(id(parameter), len(units) if begun else -1)
            members.setdefault(index, []).append((rows, parameter.numel()))
    return [tuple(members[index]) for index in sorted(members)]


def packed_sizes(buckets: Sequence[Bucket], plan: Plan, width: int) -> Iterator[float]:
    """Elements of each message with gradients or weights: large tensors are sent by themselves, others together.

    Args:
        width: bytes of an element.
    """
    for bucket in buckets:
        if plan.zero == 3:
            yield sum(numel for _, numel in bucket) / plan.tp
            continue
        shards = plan.dp_shard if plan.zero else 1
        together = 0.0
        for rows, numel in bucket:
            if rows % shards == 0 and numel / plan.tp * width >= ALONE_BYTES:
                yield numel / plan.tp
            else:
                together += numel / plan.tp
        yield together + len(bucket)


def sends(collective: str, nbytes: float, ranks: int) -> tuple[int, float]:
    """The number of sends that a CPU rank makes for a collective, and the bytes of each."""
    if collective == "all_reduce":
        if is_sent_whole(nbytes, ranks):
            return ranks - 1, nbytes
        return 2 * (ranks - 1), nbytes / ranks
    return ranks - 1, nbytes / ranks
