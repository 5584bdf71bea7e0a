"""Where a model is cut into stages: at equal costs, or where the user says; and what keeps it from being cut."""

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from tensorshard.common.words import is_inside
from tensorshard.model.tensors import TensorSpec
from tensorshard.pipeline.trace.call_graph import CallGraph, Leaf, spans

# Floating-point operations in the time that moving one byte takes: 10 to 20 on CPUs, 150 to 300 on GPUs in bf16. Fused
# operations and caches move fewer bytes than are counted here.
_FLOPS_PER_BYTE = 20.0
# A parameter, its gradient and Adam's two moments.
_COPIES = 4
# Time decides how long a step takes; memory only whether it fits. It counts less.
_MEMORY_WEIGHT = 0.25
# Cuts that are worse than the best balance by no more than this may be taken if they send less.
_TOLERANCE = 0.02
# The most tensors that a cut may send. If more cross, the model's code outside of blocks adds up what many units
# return, and each of these tensors would have to be sent.
_MOST_CROSSING = 16


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

    def received_specs(self, stage: int) -> tuple[TensorSpec, ...]:
        """The tensors that `stage` receives, without their values."""
        return tuple(self.graph.sent_spec(leaf) for leaf in self.received(stage))

    def sent_specs(self, stage: int) -> tuple[TensorSpec, ...]:
        """The tensors that `stage` sends on, without their values; nothing if it is the last."""
        return self.received_specs(stage + 1) if stage + 1 < self.stages else ()

    def parameters(self, stage: int) -> frozenset[str]:
        """First names of the parameters that `stage` holds."""
        return self._holdings[stage]

    def buffers(self, stage: int) -> frozenset[str]:
        """First names of the buffers that `stage` reads."""
        return self.graph.buffers_of(*self.spans[stage])

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters, by their first names, that several stages hold: each adds to the gradient."""
        stages_of: dict[str, list[int]] = {}
        for stage, names in enumerate(self._holdings):
            for name in names:
                stages_of.setdefault(name, []).append(stage)
        return {name: tuple(stages) for name, stages in sorted(stages_of.items()) if len(stages) > 1}

    @cached_property
    def _holdings(self) -> tuple[frozenset[str], ...]:
        names_of = [self.graph.parameters_of(*span) for span in self.spans]
        # Parameters that no call reads still belong into checkpoints. They go to the stage of their neighbours in the
        # model.
        everywhere = frozenset().union(*names_of)
        nearest = 0
        for name in self.graph.bytes_of:
            if name in everywhere:
                nearest = next(stage for stage, names in enumerate(names_of) if name in names)
            else:
                names_of[nearest] |= {name}
        return tuple(names_of)

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
                sends = ", ".join(str(self.graph.spec(leaf)) for leaf in self.sent(stage))
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
        if is_inside(unit, [name]):
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


@dataclass(frozen=True)
class CallCost:
    """Cost of one call.

    Args:
        time: in floating-point operations; moving bytes counts as the operations that would take as long.
        memory: bytes of parameters with their gradient and optimizer states, and of what is kept for backward.
        combined: the call's share of the model's time, and of its memory at a smaller weight.
    """

    time: float
    memory: float
    combined: float


def call_costs(graph: CallGraph) -> list[CallCost]:
    """Each call's cost. A parameter counts where it is first used."""
    seen: set[str] = set()
    times, memories = [], []
    for index, call in enumerate(graph.calls):
        names = graph.parameters_of(index, index + 1) - seen
        seen |= names
        times.append(call.flops + _FLOPS_PER_BYTE * call.written_bytes)
        memories.append(float(_COPIES * sum(graph.bytes_of[name] for name in names) + call.saved_bytes))
    time, memory = sum(times) or 1.0, sum(memories) or 1.0
    return [CallCost(t, m, t / time + _MEMORY_WEIGHT * m / memory) for t, m in zip(times, memories, strict=True)]


def balanced_positions(
    costs: Sequence[float], stages: int, allowed: Sequence[int], sent: Callable[[int], int]
) -> list[int]:
    """Positions of ``stages - 1`` cuts, out of those `allowed`.

    The costliest stage costs as little as possible. Of the cuts that come near to that, those that send the fewest
    bytes are taken, and of these the ones with the most equal stages.

    Args:
        costs: of the calls.
        allowed: positions, in order; there are enough of them.
        sent: bytes that a cut at a position sends.
    """
    sums = [0.0, *accumulate(costs)]
    edges = [0, *allowed, len(costs)]
    weights = [float(sent(position)) for position in allowed]
    smallest = _cheapest(edges, stages, lambda i, j: sums[edges[j]] - sums[edges[i]], max)[0]
    bound = smallest * (1 + _TOLERANCE) + 1e-12
    total = (sums[-1] or 1.0) ** 2
    most = max(weights, default=0.0) or 1.0

    def price(i: int, j: int) -> float:
        size = sums[edges[j]] - sums[edges[i]]
        if size > bound:
            return float("inf")
        sending = weights[j - 1] / most if j - 1 < len(weights) else 0.0
        return sending + 1e-3 * size * size / total

    chosen = _cheapest(edges, stages, price, lambda a, b: a + b)[1]
    return [edges[index] for index in chosen]


def _cheapest(
    edges: Sequence[int],
    stages: int,
    price: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The best way to go from the first edge to the last in `stages` steps: its price, and the edges between."""
    last = len(edges) - 1
    best = [(price(0, j) if j else float("inf"), [0]) for j in range(last + 1)]
    for stage in range(2, stages + 1):
        after = [(float("inf"), [0])] * (last + 1)
        for j in range(stage, last + 1):
            candidates = ((join(best[i][0], price(i, j)), i) for i in range(stage - 1, j) if best[i][0] < float("inf"))
            value, i = min(candidates, default=(float("inf"), 0))
            after[j] = (value, [*best[i][1], i])
        best = after
    return best[last][0], best[last][1][1:]


def obstacle(graph: CallGraph, position: int) -> str | None:
    """Why `graph` cannot be cut before the call at `position`; None if it can."""
    after = graph.calls[position].unit
    before = {call.unit for call in graph.calls[:position]}
    for later in graph.calls[position:]:
        if later.unit in before and later.unit in graph.stateful:
            return (
                f"{later.unit!r} is called on both sides and changes its buffers (running statistics, say), which two "
                f"stages would change apart; all calls of it must be on one stage"
            )
    for buffer, writers in graph.buffer_writers.items():
        readers = {index for index in range(len(graph.calls) + 1) if buffer in graph.reads(index).buffers}
        for writer in sorted(writers):
            reader = next((i for i in sorted(readers | writers) if (i < position) != (writer < position)), None)
            if reader is not None:
                return (
                    f"{_name(graph, writer)} changes the buffer {buffer!r}, which {_name(graph, reader)} reads, too; "
                    f"two stages would have it differently, so both must be on one stage"
                )
    for index in range(position, len(graph.calls) + 1):
        for call in graph.reads(index).side_outputs:
            if call < position:
                return (
                    f"{graph.calls[call].unit!r} hands {_name(graph, index)} a tensor by another way than its return "
                    f"value (an attribute, an object, or a tensor changed in place), so both must be on one stage; "
                    f"return it instead"
                )
    rng_ops_before = frozenset().union(*(graph.reads(index).rng_ops for index in range(position)))
    for index in range(position, len(graph.calls) + 1):
        if graph.reads(index).rng_ops & rng_ops_before:
            return (
                f"{_name(graph, index)} and a module before {after!r} read the same random numbers (dropout in code "
                f"outside of any module, say), which two stages would draw apart; make it an nn.Dropout module"
            )
    crossing = graph.crossing(position)
    for leaf in crossing:
        if graph.calls[leaf[0]].unit in graph.hooked:
            return (
                f"{graph.calls[leaf[0]].unit!r}, whose output a cut before {after!r} would send, has a hook on its "
                f"backward, which does not see gradients that come from another stage; hook a module inside of it"
            )
        if leaf in graph.changed and leaf in graph.overwritten:
            return (
                f"the output of {graph.calls[leaf[0]].unit!r}, which a cut before {after!r} would send, is changed in "
                f"place by a later module and by code outside of modules, so that two stages would have it "
                f"differently; make one of the two return a new tensor"
            )
    if len(crossing) > _MOST_CROSSING:
        sources = sorted({graph.calls[leaf[0]].unit for leaf in crossing})
        return (
            f"a cut before {after!r} would send {len(crossing)} tensors, outputs of {', '.join(map(repr, sources[:3]))}"
            f" and others that are still needed; at most {_MOST_CROSSING} may cross. Name the modules that enclose "
            f"them as units (pp_units)"
        )
    return None


def _name(graph: CallGraph, index: int) -> str:
    return "the model's output" if index == len(graph.calls) else repr(graph.calls[index].unit)


def unit_stages(cut: Cut) -> dict[str, frozenset[int]]:
    """The stages that can compute each unit: those that call it; if none does, those that hold its parameters.

    Left out are units that other units call as a part of themselves, and units of which no stage has all parameters.
    """
    stages_of: dict[str, set[int]] = {}
    for stage, (start, stop) in enumerate(cut.spans):
        for call in cut.graph.calls[start:stop]:
            stages_of.setdefault(call.unit, set()).add(stage)
    for unit, names in cut.graph.parameters.items():
        if unit not in stages_of and unit not in cut.graph.nested:
            holding = [stage for stage in range(cut.stages) if cut.parameters(stage).issuperset(names)]
            if holding:
                stages_of[unit] = {holding[0] if names else cut.stages - 1}
    return {unit: frozenset(stages) for unit, stages in stages_of.items()}


def place_calls(graph: CallGraph, cut: Cut, stages_of: Mapping[str, frozenset[int]]) -> Cut | None:
    """The calls of `graph` on the stages of `cut`, each on a stage that has its unit.

    If several stages have a unit (a cell that is called for each time step, say), its calls are divided as nearly as
    possible as in `cut`.

    Args:
        graph: another run of the model.
        stages_of: as :func:`unit_stages` gives them.

    Returns:
        None if the order of the calls does not allow it.
    """
    calls, last = graph.calls, cut.stages - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by stage: how far from `cut`, and its positions
    for position, call in enumerate(calls):
        reached = dict(best)
        cuttable = position == 0 or obstacle(graph, position) is None
        for stage in range(last) if cuttable else ():
            origin = reached.get(stage)
            if origin is None:
                continue
            moved = abs(position / len(calls) - cut.positions[stage] / len(cut.graph.calls))
            following = (origin[0] + moved, (*origin[1], position))
            reached[stage + 1] = min(reached.get(stage + 1, following), following)
        best = {stage: way for stage, way in reached.items() if stage in stages_of.get(call.unit, ())}
    if last not in best:
        return None
    placed = Cut(graph, best[last][1])
    holds_all = all(graph.parameters_of(*span) <= cut.parameters(stage) for stage, span in enumerate(placed.spans))
    return placed if holds_all else None
