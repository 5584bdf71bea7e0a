"""What an estimate says of plans that are like the one that was estimated: by how much predictions are off there."""

import math
from dataclasses import dataclass, field
from typing import Any

from tensorshard.plan import Plan

_PIPELINE = ("tp", "sequence_parallel", "pp", "pp_schedule", "pp_stages_per_rank")
_DATA = ("zero", "dp_shard", "dp_replicate")


@dataclass
class Corrections:
    """Ratios of estimated to predicted seconds."""

    _known: dict[tuple[Any, ...], list[tuple[Plan, float]]] = field(default_factory=dict)

    def note(self, plan: Plan, predicted: float, estimated: float) -> None:
        """A plan was estimated."""
        self._known.setdefault(_kind(plan), []).append((plan, estimated / predicted))

    def of(self, plan: Plan) -> float | None:
        """What to multiply the prediction of a plan by: the ratio of the nearest plan with its stages and its split
        layers; None where there is none."""
        known = self._known.get(_kind(plan))
        return None if known is None else min(known, key=lambda one: _distance(plan, one[0]))[1]


def _kind(plan: Plan) -> tuple[Any, ...]:
    return tuple(getattr(plan, name) for name in _PIPELINE)


def _distance(one: Plan, other: Plan) -> tuple[float, float]:
    """How different two plans with the same stages are; micro-batches in powers of two."""
    differing = sum(getattr(one, name) != getattr(other, name) for name in (*_DATA, "recompute", "offload"))
    return differing, abs(math.log2(one.micro_batches / other.micro_batches))
