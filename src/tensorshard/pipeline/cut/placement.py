"""The stages of unit calls in a run that differs from the run by which the model was cut."""

from collections.abc import Mapping

from tensorshard.pipeline.cut.cut import Cut
from tensorshard.pipeline.cut.obstacles import obstacle
from tensorshard.pipeline.trace.call_graph import CallGraph


def unit_stages(cut: Cut) -> dict[str, frozenset[int]]:
    """The stages that can compute each unit: those that call it; if none does, those that hold its parameters.

    Left out are units that other units call as a part of themselves, and units of which no stage has all parameters.
    """
    found: dict[str, set[int]] = {}
    for stage, (start, stop) in enumerate(cut.spans):
        for call in cut.graph.calls[start:stop]:
            found.setdefault(call.unit, set()).add(stage)
    for unit, names in cut.graph.parameters.items():
        if unit not in found and unit not in cut.graph.nested:
            holding = [stage for stage in range(cut.stages) if cut.parameters(stage).issuperset(names)]
            if holding:
                found[unit] = {holding[0] if names else cut.stages - 1}
    return {unit: frozenset(stages) for unit, stages in found.items()}


def place_calls(graph: CallGraph, cut: Cut, stages_of: Mapping[str, frozenset[int]], *, trains: bool) -> Cut | None:
    """The calls of `graph` on the stages of `cut`, each on a stage that has its unit.

    If several stages have a unit (a cell that is called for each time step, say), its calls are divided as nearly as
    possible as in `cut`.

    Args:
        graph: another run of the model.
        stages_of: as :func:`unit_stages` gives them.
        trains: whether every stage must compute something.

    Returns:
        None if the order of the calls does not allow it.
    """
    calls, last = graph.calls, cut.stages - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by stage: how far from `cut`, and its positions
    for position, call in enumerate(calls):
        reached = dict(best)
        cuttable = position == 0 or obstacle(graph, position) is None
        for stage in range(last) if cuttable and (position or not trains) else ():
            origin = (best if trains else reached).get(stage)
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
