"""Backward in two parts: the gradients of a stage's inputs now, those of its parameters later.

The idea is that of Qi et al., "Zero Bubble Pipeline Parallelism" (2023). torch.distributed.pipelining finds the two
parts in the autograd graph in the same way. Unlike there, the second part accumulates gradients as every backward does:
hooks of parameters see them, and outputs may be views.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from tensorshard.plan.plan import Plan


@dataclass
class _Group:
    """Parameters whose gradients come from the same nodes of the graph.

    Args:
        gates: nodes on the paths to the inputs, at which the paths to these parameters branch off.
        parameters: the parameters.
    """

    gates: list[Node] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)


class WeightBackward:
    """The second part of a backward: the gradients of the parameters."""

    def __init__(
        self, groups: list[_Group], gradients: dict[Node, list[torch.Tensor | None]], roots: list[GradientEdge]
    ) -> None:
        self._roots = roots  # they keep the graph alive, which nodes of Python functions do not
        # Groups with several gates first: their paths may lead through nodes of other groups, which must still exist.
        self._groups = sorted(groups, key=lambda group: -len(group.gates))
        self._gradients = gradients

    def run(self) -> None:
        """Adds to the parameters' gradients. It may be called once."""
        for group in self._groups:
            edges, values, handles = [], [], []
            for gate in group.gates:
                gradients_in = self._gradients.get(gate)
                for index, gradient in enumerate(gradients_in or ()):
                    if gradient is not None:
                        edges.append(GradientEdge(gate, index))
                        values.append(gradient)
                if gradients_in is not None and len(group.gates) > 1:
                    # A gradient that flows from one gate into another is already in the other's own gradient.
                    handles.append(gate.register_prehook(partial(_replaced, tuple(gradients_in))))
            try:
                if edges:
                    torch.autograd.backward(edges, values, retain_graph=len(group.gates) > 1, inputs=group.parameters)
            finally:
                for handle in handles:
                    handle.remove()
        self._groups, self._gradients, self._roots = [], {}, []


def backward_of_inputs(
    roots: list[GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    parameters: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor | None], WeightBackward]:
    """The gradients of `inputs`, and the second part of the backward, for those of `parameters`.

    Args:
        roots: where backward starts.
        gradients: that arrive there.
        inputs: leaves.
        parameters: leaves.
    """
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    targets = {get_gradient_edge(tensor).node for tensor in wanted}
    leaves = {get_gradient_edge(p).node: p for p in parameters if p.requires_grad}
    order = _nodes([edge.node for edge in roots])
    on_the_way = _reaching(order, targets)
    arriving: dict[Node, list[torch.Tensor | None]] = {}
    for edge, gradient in zip(roots, gradients, strict=True):
        if edge.node not in on_the_way:  # not on a path to the inputs
            slots = arriving.setdefault(edge.node, [])
            slots.extend([None] * (edge.output_nr + 1 - len(slots)))
            before = slots[edge.output_nr]
            slots[edge.output_nr] = gradient if before is None else before + gradient
    groups = _groups(order, on_the_way, {edge.node for edge in roots}, leaves)
    handles = [
        gate.register_prehook(partial(_noted, arriving, gate))
        for group in groups
        for gate in group.gates
        if gate in on_the_way
    ]
    computed: Sequence[torch.Tensor | None] = ()
    try:
        if wanted and roots:
            computed = torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    made = iter(computed)
    return [next(made, None) if t.requires_grad else None for t in inputs], WeightBackward(groups, arriving, roots)


def _nodes(roots: list[Node]) -> list[Node]:
    """Every node of the graph, each after all nodes on the paths from the roots to it."""
    waiting: dict[Node, int] = {}
    queue = deque(dict.fromkeys(roots))
    seen = set(queue)
    while queue:  # how many edges lead to each node
        for following, _ in queue.popleft().next_functions:
            if following is None:
                continue
            waiting[following] = waiting.get(following, 0) + 1
            if following not in seen:
                seen.add(following)
                queue.append(following)
    order: list[Node] = []
    ready = deque(node for node in dict.fromkeys(roots) if not waiting.get(node))
    while ready:
        node = ready.popleft()
        order.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)
    return order


def _reaching(order: list[Node], targets: set[Node]) -> set[Node]:
    reaching: set[Node] = set()
    for node in reversed(order):
        if node in targets or any(following in reaching for following, _ in node.next_functions):
            reaching.add(node)
    return reaching


def _groups(
    order: list[Node], on_the_way: set[Node], roots: set[Node], leaves: dict[Node, torch.Tensor]
) -> list[_Group]:
    """The parameters, grouped by the gates that they share."""
    gates_of: dict[Node, set[Node]] = {}
    for node in order:
        if node in on_the_way:
            gates = {node}
        else:
            gates = gates_of.get(node, set()) | ({node} if node in roots else set())
            gates_of[node] = gates
        for following, _ in node.next_functions:
            if following is not None and following not in on_the_way:
                gates_of.setdefault(following, set()).update(gates)
    group_of: dict[Node, _Group] = {}
    for leaf, parameter in leaves.items():
        merged = _Group(list(gates_of.get(leaf, ())), [parameter])
        for group in {id(g): g for g in (group_of.get(gate) for gate in merged.gates) if g is not None}.values():
            merged.gates += [gate for gate in group.gates if gate not in merged.gates]
            merged.parameters += group.parameters
        for gate in merged.gates:
            group_of[gate] = merged
    return list({id(group): group for group in group_of.values()}.values())


def _noted(arriving: dict[Node, list[torch.Tensor | None]], gate: Node, gradients: Any) -> None:
    arriving[gate] = list(gradients)


def _replaced(gradients: Any, _: Any) -> Any:
    return gradients


def may_split_backward(plan: Plan) -> bool:
    """Whether gradients of inputs and of parameters may be computed separately.

    They may not where something would be computed or sent twice, as in recomputed blocks and split layers, nor where
    parameters are held during only one of the two.
    """
    whole_parameters = plan.zero < 3 or plan.shard_size == 1  # type: ignore[operator]
    return plan.tp == plan.cp == 1 and whole_parameters and plan.recompute == "none" and not plan.compile
