"""How a model's time is divided among the stages of a pipeline, by the cut that the Engine would make."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorshard.pipeline.cut.cut import Cut, cut_model
from tensorshard.pipeline.trace.call_graph import CallGraph
from tensorshard.pipeline.trace.tracer import Tracer
from tensorshard.plan import Plan
from tensorshard.schedules import find_schedule


@dataclass
class StageCosts:
    """The cuts of one model.

    Args:
        graph: the calls of its run on `samples` samples.
    """

    graph: CallGraph
    samples: int
    _cuts: dict[tuple[int, Any], Cut] = field(default_factory=dict)
    _shares: dict[Any, tuple[float, ...]] = field(default_factory=dict)
    _sent: dict[tuple[int, ...], float] = field(default_factory=dict)

    def cut(self, plan: Plan) -> Cut:
        """Where a plan cuts the model.

        Raises:
            ValueError: the model cannot be cut that way.
        """
        key = (plan.pp * plan.stages_per_rank, None if plan.pp_split is None else tuple(plan.pp_split))
        if key not in self._cuts:
            self._cuts[key] = cut_model(self.graph, key[0], split=plan.pp_split)
        return self._cuts[key]

    def shares(self, plan: Plan, arithmetic: float) -> tuple[float, ...]:
        """Each pipeline rank's share of the time of a forward, or of a backward; they add up to 1.

        Args:
            arithmetic: the share of products, convolutions and attention in the time. This part of the time is divided
                among calls by their floating-point operations, and the rest by the bytes that they write.
        """
        key = (plan.pp, plan.pp_schedule, plan.stages_per_rank, arithmetic)
        if key not in self._shares:
            calls = self.graph.calls
            flops, written = sum(call.flops for call in calls) or 1, sum(call.written_bytes for call in calls) or 1
            each = [arithmetic * c.flops / flops + (1 - arithmetic) * c.written_bytes / written for c in calls]
            of_stage = [sum(each[start:stop]) for start, stop in self.cut(plan).spans]
            schedule, total = find_schedule(plan.pp_schedule), sum(of_stage) or 1.0
            self._shares[key] = tuple(
                sum(of_stage[stage] for stage in schedule.stages_of(rank, plan.pp, plan.stages_per_rank)) / total
                for rank in range(plan.pp)
            )
        return self._shares[key]

    def sent(self, plan: Plan) -> float:
        """The bytes of one sample that cross the widest cut."""
        positions = self.cut(plan).positions
        if positions not in self._sent:
            self._sent[positions] = max((self.graph.crossing_bytes(p) for p in positions), default=0) / self.samples
        return self._sent[positions]


def stage_costs(model: nn.Module, inputs: Any, samples: int, fixed: Mapping[str, Any]) -> StageCosts | None:
    """The costs of a model's calls; None if the user names the units, or the model cannot be run in stages.

    Args:
        inputs: a batch of `samples`.
        fixed: fields of a Plan that the user gave.
    """
    if fixed.get("pp_units") is not None or fixed.get("pp") == 1:
        return None
    try:
        return StageCosts(Tracer(model, device=torch.device("cpu")).trace(inputs), samples)
    except Exception:  # a model's code may raise anything for tensors without values; a plan with stages reports it
        return None
