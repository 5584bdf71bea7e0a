"""Corrects predictions by estimates: the error of a prediction is likely the same for plans like the estimated one."""

import math
from dataclasses import dataclass, field
from typing import Any

from tensorshard.plan.plan import RECOMPUTE_MODES, Plan

_PIPELINE = ("tp", "sequence_parallel", "pp", "pp_schedule", "pp_stages_per_rank")
_DATA = ("zero", "dp_shard", "dp_replicate")
_SURE = 0.8  # the part of what estimates had beyond their predicted bytes that other plans are taken to have as well
_LIKELY = 0.5  # the same part for plans that recompute otherwise, which decides no more than the order of estimates


@dataclass
class Corrections:
    """Ratios of estimated to predicted seconds and bytes."""

    _known: dict[tuple[Any, ...], list[tuple[Plan, float]]] = field(default_factory=dict)
    _bytes: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def note(self, plan: Plan, predicted: float, estimated: float) -> None:
        """Notes the seconds of a plan that was predicted and then estimated."""
        self._known.setdefault(_kind(plan), []).append((plan, estimated / predicted))

    def of(self, plan: Plan) -> float | None:
        """The factor for the prediction of `plan`: the ratio of the nearest estimated plan with the same stages and the
        same split of layers; None if there is none."""
        known = self._known.get(_kind(plan))
        return None if known is None else min(known, key=lambda one: _distance(plan, one[0]))[1]

    def doubt_of(self, plan: Plan) -> float | None:
        """How far that factor may be off: half of the range of the ratios for plans with the same stages and the same
        split of layers; None if there are none."""
        known = self._known.get(_kind(plan))
        return None if known is None else (max(ratio for _, ratio in known) - min(ratio for _, ratio in known)) / 2

    def note_memory(self, plan: Plan, predicted: int, estimated: int) -> None:
        """Notes the bytes of a plan that was predicted and then estimated, on as many ranks as were run."""
        kind, ratio = _kind_of_memory(plan), max(1.0, estimated / predicted)
        self._bytes[kind] = min(ratio, self._bytes.get(kind, ratio))

    def of_memory(self, plan: Plan) -> float:
        """The factor for the predicted bytes of `plan`: most of the least ratio of the estimated plans that shard and
        recompute alike, with or without a pipeline as it is; 1 if there are none."""
        return 1 + _SURE * (self._bytes.get(_kind_of_memory(plan), 1.0) - 1)

    def likely_of_memory(self, plan: Plan) -> float:
        """The same, guessed from plans that recompute otherwise if none of those with the same recomputation was
        estimated."""
        pipeline, zero, _, offload = kind = _kind_of_memory(plan)
        if kind in self._bytes:
            return self.of_memory(plan)
        alike = [self._bytes.get((pipeline, zero, recompute, offload), 1.0) for recompute in RECOMPUTE_MODES]
        return 1 + _LIKELY * (max(alike) - 1)


def _kind_of_memory(plan: Plan) -> tuple[Any, ...]:
    return plan.pp > 1, plan.zero, plan.recompute, plan.offload


def _kind(plan: Plan) -> tuple[Any, ...]:
    return tuple(getattr(plan, name) for name in _PIPELINE)


def _distance(one: Plan, other: Plan) -> tuple[float, float]:
    """How different two plans with the same stages are: the number of differing fields, then micro-batches in powers of
    two."""
    differing = sum(getattr(one, name) != getattr(other, name) for name in (*_DATA, "recompute", "offload"))
    return differing, abs(math.log2(one.micro_batches / other.micro_batches))
