"""Where a model is cut into stages: at equal costs, or where the user says."""

import difflib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from tensorshard.pipeline.cut.balance import balanced_positions
from tensorshard.pipeline.cut.costs import call_costs
from tensorshard.pipeline.cut.obstacles import obstacle
from tensorshard.pipeline.trace.call_graph import CallGraph, Leaf, spans


@dataclass(frozen=True)
class Cut:
    """A model's unit calls, cut into stages.

    Args:
        graph: the calls.
        positions: index of the first call of each stage except the first.
    """

    graph: CallGraph
    positions: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.positions) + 1

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Each stage's range of calls: its first, and the one after its last."""
        return tuple(spans(self.positions, len(self.graph.calls)))

    def received(self, stage: int) -> tuple[Leaf, ...]:
        """What `stage` receives from the one before it, in the order in which it is sent."""
        return self.graph.crossing(self.positions[stage - 1]) if stage else ()

    def sent(self, stage: int) -> tuple[Leaf, ...]:
        """What `stage` sends to the one after it; the rest of what it returns is the model's output."""
        return self.received(stage + 1) if stage + 1 < self.stages else ()

    def parameters(self, stage: int) -> frozenset[str]:
        """First names of the parameters that `stage` holds."""
        return self._holdings[stage]

    def buffers(self, stage: int) -> frozenset[str]:
        """First names of the buffers that `stage` reads."""
        return self.graph.buffers_of(*self.spans[stage])

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters, by their first names, that several stages hold: each adds to the gradient."""
        found: dict[str, list[int]] = {}
        for stage, names in enumerate(self._holdings):
            for name in names:
                found.setdefault(name, []).append(stage)
        return {name: tuple(stages) for name, stages in sorted(found.items()) if len(stages) > 1}

    @cached_property
    def _holdings(self) -> tuple[frozenset[str], ...]:
        held = [self.graph.parameters_of(*span) for span in self.spans]
        # Parameters that no call reads still belong into checkpoints. They go to the stage of their neighbours in the
        # model.
        everywhere = frozenset().union(*held)
        nearest = 0
        for name in self.graph.bytes_of:
            if name in everywhere:
                nearest = next(stage for stage, names in enumerate(held) if name in names)
            else:
                held[nearest] |= {name}
        return tuple(held)

    def describe(self) -> str:
        """A line for each stage: its calls, its share of the time and of the memory, and what it sends."""
        costs = call_costs(self.graph)
        time, memory = sum(cost.time for cost in costs) or 1.0, sum(cost.memory for cost in costs) or 1.0
        lines = []
        for stage, (start, stop) in enumerate(self.spans):
            first, last = self.graph.calls[start].unit, self.graph.calls[stop - 1].unit
            calls = first if stop - start == 1 else f"{first} to {last}"
            own = costs[start:stop]
            line = (
                f"stage {stage:<3} {calls:<48} {sum(c.time for c in own) / time:6.1%} of the time, "
                f"{sum(c.memory for c in own) / memory:6.1%} of the memory, "
                f"{self.graph.parameter_bytes(start, stop) / 2**20:.1f} MiB of parameters"
            )
            if stage + 1 < self.stages:
                sends = ", ".join(str(self.graph.layout(leaf)) for leaf in self.sent(stage))
                line += f"; sends {sends or 'nothing'}"
            lines.append(line)
        for name, stages in self.shared.items():
            lines.append(f"{name} is on stages {', '.join(map(str, stages))}; their gradients are added")
        return "\n".join(lines)


def cut_model(graph: CallGraph, stages: int, *, split: list[str] | None = None) -> Cut:
    """Cuts the calls of `graph` into `stages` ranges.

    Args:
        stages: how many; all ranks' together.
        split: names of modules, each of which starts a new stage; None to choose cuts by cost (floating-point
            operations and bytes moved, parameters and what is kept for backward).

    Raises:
        ValueError: there are fewer units than stages, no cut is possible where one is needed, or `split` names a module
            that cannot start a stage. The message names the module in the way and what to name instead.
    """
    names = [call.unit for call in graph.calls]
    if stages < 1:
        raise ValueError(f"the number of stages is {stages}; it must be at least 1")
    if split is not None:
        positions = _named_positions(graph, split, stages)
        return Cut(graph, tuple(positions))
    if stages > len(names):
        called = (
            f"has {len(names)} unit{'s' * (len(names) != 1)}"
            if set(names) == set(graph.parameters)
            else (f"calls {len(set(names))} of its {len(graph.parameters)} units {len(names)} times")
        )
        raise ValueError(
            f"the model {called} ({_some(names)}), which cannot make {stages} stages; with this model "
            f"there can be at most {len(names)}. Use fewer stages, or name smaller modules as units (pp_units)"
        )
    obstacles = {position: obstacle(graph, position) for position in range(1, len(names))}
    allowed = [position for position, reason in obstacles.items() if reason is None]
    if len(allowed) < stages - 1:
        raise ValueError(
            f"{stages} stages need {stages - 1} cuts, but the model can be cut at {len(allowed)} of its "
            f"{len(names) - 1} places{_where(names, allowed)}; {_worst(obstacles)}"
        )
    costs = [cost.combined for cost in call_costs(graph)]
    return Cut(graph, tuple(balanced_positions(costs, stages, allowed, graph.crossing_bytes)))


def _named_positions(graph: CallGraph, split: list[str], stages: int) -> list[int]:
    names = [call.unit for call in graph.calls]
    if len(split) + 1 != stages:
        raise ValueError(
            f"pp_split names {len(split)} modules ({_some(split)}), each of which starts a stage after the first, so "
            f"it makes {len(split) + 1} stages; {stages} are needed: name {stages - 1} modules"
        )
    positions: list[int] = []
    for name in split:
        position = _first_call(graph, name)
        if position == 0:
            raise ValueError(
                f"pp_split names {name!r}, which the first stage starts with anyway; name the modules that start the "
                f"second stage and those after it"
            )
        if split.count(name) > 1:
            raise ValueError(f"pp_split names {name!r} {split.count(name)} times; each name starts one stage")
        if positions and position <= positions[-1]:
            raise ValueError(
                f"pp_split names {name!r} after {split[len(positions) - 1]!r}, but it is called "
                f"{'with' if position == positions[-1] else 'before'} it; the order of the calls is {_some(names, 8)}"
            )
        reason = obstacle(graph, position)
        if reason is not None:
            allowed = [p for p in range(1, len(names)) if obstacle(graph, p) is None]
            raise ValueError(f"pp_split cannot cut before {name!r}: {reason}{_where(names, allowed, position)}")
        positions.append(position)
    return positions


def _first_call(graph: CallGraph, name: str) -> int:
    names = [call.unit for call in graph.calls]
    for index, unit in enumerate(names):
        if unit == name or unit.startswith(f"{name}."):
            return index
    enclosing = [unit for unit in names if name.startswith(f"{unit}.")]
    if enclosing:
        raise ValueError(
            f"pp_split names {name!r}, which is inside of {enclosing[0]!r}, and that runs on one stage as a whole; "
            f"name {enclosing[0]!r}, or make {name!r} a unit (pp_units)"
        )
    if name in graph.parameters:
        raise ValueError(
            f"pp_split names {name!r}, which was not called in the run on the sample inputs; name one that was, such "
            f"as {_some(names)}"
        )
    prefixes = {unit.rsplit(".", depth)[0] for unit in names for depth in range(unit.count(".") + 1)}
    near = difflib.get_close_matches(name, sorted(prefixes), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the units are {_some(names, 8)}"
    raise ValueError(f"pp_split names {name!r}, which is no module that is called; {hint}")


def _where(names: list[str], allowed: list[int], near: int | None = None) -> str:
    if not allowed:
        return "; there is no place where it can be cut"
    if near is not None:
        allowed = sorted(sorted(allowed, key=lambda position: abs(position - near))[:3])
    return f"; before {_some([names[position] for position in allowed], 6)} it can be"


def _worst(obstacles: dict[int, str | None]) -> str:
    reasons = Counter(reason for reason in obstacles.values() if reason is not None)
    return reasons.most_common(1)[0][0]


def _some(names: list[str], count: int = 4) -> str:
    shown = [repr(name) for name in names[:count]]
    return ", ".join(shown) + (f" and {len(names) - count} more" if len(names) > count else "")
