"""How a model's time is divided among the stages of a pipeline, by the cut that the Engine would make."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorshard.pipeline.cut import Cut, cut_model
from tensorshard.pipeline.trace.call_graph import CallGraph
from tensorshard.pipeline.trace.tracer import Tracer
from tensorshard.plan.plan import Plan
from tensorshard.plan.schedules import find_schedule
from tensorshard.predict.hardware import Rates
from tensorshard.predict.operations import Kernel
from tensorshard.predict.step_time import kernel_time


@dataclass
class StageCosts:
    """The cuts of one model.

    Args:
        graph: the calls of its run on `samples` samples.
        kernels: each called unit's name, and the kernels of its forward and of the functional code before it.
    """

    graph: CallGraph
    samples: int
    kernels: Sequence[tuple[str, Counter[Kernel]]]
    _cuts: dict[tuple[int, Any], Cut] = field(default_factory=dict)
    _shares: dict[Any, tuple[float, ...]] = field(default_factory=dict)
    _sent: dict[tuple[int, ...], float] = field(default_factory=dict)
    _times: list[float] = field(default_factory=list)

    def cut(self, plan: Plan) -> Cut:
        """Where a plan cuts the model.

        Raises:
            ValueError: the model cannot be cut that way.
        """
        key = (plan.pp * plan.stages_per_rank, None if plan.pp_split is None else tuple(plan.pp_split))
        if key not in self._cuts:
            self._cuts[key] = cut_model(self.graph, key[0], split=plan.pp_split)
        return self._cuts[key]

    def shares(self, plan: Plan, rates: Rates) -> tuple[float, ...]:
        """Each pipeline rank's share of the time of a forward, or of a backward; they add up to 1."""
        key = (plan.pp, plan.pp_schedule, plan.stages_per_rank)
        if key not in self._shares:
            self._times = self._times or self._seconds(rates)
            of_stage = [sum(self._times[start:stop]) for start, stop in self.cut(plan).spans]
            schedule, total = find_schedule(plan.pp_schedule), sum(of_stage) or 1.0
            self._shares[key] = tuple(
                sum(of_stage[stage] for stage in schedule.stages_of(rank, plan.pp, plan.stages_per_rank)) / total
                for rank in range(plan.pp)
            )
        return self._shares[key]

    def _seconds(self, rates: Rates) -> list[float]:
        """Seconds of each call; if the model was not run in the same way for its kernels, its arithmetic in their
        place."""
        calls = self.graph.calls
        if [name for name, _ in self.kernels] != [call.unit for call in calls]:
            return [float(call.flops) for call in calls]
        return [sum(kernel_time(one, rates) * count for one, count in each.items()) for _, each in self.kernels]

    def sent(self, plan: Plan) -> float:
        """The bytes of one sample that cross the widest cut."""
        positions = self.cut(plan).positions
        if positions not in self._sent:
            self._sent[positions] = max((self.graph.crossing_bytes(p) for p in positions), default=0) / self.samples
        return self._sent[positions]


def call_graph(model: nn.Module, inputs: Any, fixed: Mapping[str, Any]) -> CallGraph | None:
    """The calls of a model's units; None if the user names the units, or the model cannot be run in stages.

    Args:
        fixed: fields of a Plan that the user gave.
    """
    if fixed.get("pp_units") is not None or fixed.get("pp") == 1:
        return None
    try:
        return Tracer(model, device=torch.device("cpu")).trace(inputs)
    except Exception:  # a model's code may raise anything for tensors without values; a plan with stages reports it
        return None
