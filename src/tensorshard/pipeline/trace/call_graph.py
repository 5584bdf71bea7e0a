"""The result of one run of a model: its unit calls in order, and which earlier outputs each of them needs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tensorshard.model.tensors import Structure, TensorSpec

Leaf = tuple[int, int]
"""A tensor: the index of the unit call that returned it, and its index among the tensors of that call's output."""


@dataclass(frozen=True)
class Reads:
    """What a unit call, or the model's output, is computed from.

    Args:
        leaves: outputs of earlier unit calls.
        parameters: by their first names, those that functional code or the call itself reads.
        buffers: likewise.
        rng_ops: random operations of functional code, by number.
        side_outputs: earlier calls whose tensors it reads although they were not returned.
    """

    leaves: frozenset[Leaf] = frozenset()
    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    rng_ops: frozenset[int] = frozenset()
    side_outputs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit.

    Args:
        unit: the unit's name.
        reads: what it needs.
        gradients: those outputs of earlier calls that get a gradient from its own outputs.
        structure, specs: its output, and the tensors in it.
        flops: floating-point operations of its forward and of the functional code before it.
        written_bytes: bytes of all tensors that the operations of both return.
        saved_bytes: bytes that its forward keeps for backward, without parameters.
    """

    unit: str
    reads: Reads
    gradients: frozenset[Leaf]
    structure: Structure
    specs: tuple[TensorSpec, ...]
    flops: int
    written_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class CallGraph:
    """One run of a model.

    Args:
        calls: of units, in their order.
        output: what the model's output needs.
        output_gradients: outputs of calls that gradients of the model's output go to.
        output_kinds: the classes of objects in the model's output that are no containers of tensors.
        overwritten: outputs of calls that code outside of units changes in place.
        changed: outputs of calls that later calls change in place.
        overwrites_inputs: whether the model changes its inputs in place.
        written_parameters: by their first names, those that code outside of units changes in place.
        trained_writes: the calls that change parameters in place which get gradients: which, and the line of code.
        buffer_writers: the calls that change a buffer, by its first name.
        parameters: for each unit, its parameters by their first names; those of its submodules included.
        bytes_of: bytes of each parameter.
        stateful: units that change buffers of theirs.
        nested: units that others call as a part of themselves.
        hooked: units with hooks on their backward.
        unsplittable_backward: whether gradients of inputs and of parameters must be computed together, for hooks that
            change them on their way, or for regions that are recomputed as one autograd function.
    """

    calls: tuple[UnitCall, ...]
    output: Reads
    output_gradients: frozenset[Leaf]
    output_kinds: tuple[str, ...]
    overwritten: frozenset[Leaf]
    changed: frozenset[Leaf]
    overwrites_inputs: bool
    written_parameters: frozenset[str]
    trained_writes: dict[int, str]
    buffer_writers: dict[str, frozenset[int]]
    parameters: dict[str, tuple[str, ...]]
    bytes_of: dict[str, int]
    stateful: frozenset[str]
    nested: frozenset[str]
    hooked: frozenset[str]
    unsplittable_backward: bool

    def reads(self, index: int) -> Reads:
        """What call `index` needs; what the output needs for the index after the last call."""
        return self.output if index == len(self.calls) else self.calls[index].reads

    def spec(self, leaf: Leaf) -> TensorSpec:
        """The spec of `leaf`."""
        return self.calls[leaf[0]].specs[leaf[1]]

    def output_of(self, leaf: Leaf) -> tuple[str, int]:
        """The unit that returns `leaf`, and its index among the tensors that the unit returns."""
        return self.calls[leaf[0]].unit, leaf[1]

    def sent_spec(self, leaf: Leaf) -> TensorSpec:
        """The spec of a `leaf` that crosses a cut; without a gradient where none comes back for it."""
        spec = self.spec(leaf)
        return replace(spec, requires_grad=spec.requires_grad and leaf in self._with_gradients)

    @cached_property
    def _with_gradients(self) -> frozenset[Leaf]:
        # If later calls write into an output, it may need a gradient that its first content does not need.
        leaves = set(self.output_gradients | self.changed)
        with_gradients = {call for call, _ in leaves}
        for index in reversed(range(len(self.calls))):
            if index in with_gradients:
                leaves |= self.calls[index].gradients
                with_gradients |= {call for call, _ in self.calls[index].gradients}
        return frozenset(leaves)

    @cached_property
    def _last_use(self) -> dict[Leaf, int]:
        last: dict[Leaf, int] = {}
        for index in range(len(self.calls) + 1):
            for leaf in self.reads(index).leaves:
                last[leaf] = index
        return last

    def crossing(self, position: int) -> tuple[Leaf, ...]:
        """The outputs of calls before `position` that calls from there on, or the model's output, need."""
        return tuple(sorted(leaf for leaf, last in self._last_use.items() if leaf[0] < position <= last))

    def crossing_bytes(self, position: int) -> int:
        """Bytes that a cut at `position` sends in the forward of one micro-batch."""
        return sum(self.spec(leaf).nbytes for leaf in self.crossing(position))

    def buffers_of(self, start: int, stop: int) -> frozenset[str]:
        """First names of the buffers that are read for the calls from `start` to before `stop`."""
        last = stop + (stop == len(self.calls))
        return frozenset().union(*(self.reads(index).buffers for index in range(start, last)))

    def parameters_of(self, start: int, stop: int) -> frozenset[str]:
        """First names of the parameters that a stage needs for the calls from `start` to before `stop`."""
        needed: set[str] = set()
        for index in range(start, stop):
            needed |= set(self.parameters[self.calls[index].unit]) | self.calls[index].reads.parameters
        if stop == len(self.calls):
            needed |= self.output.parameters
        return frozenset(needed)

    def parameter_bytes(self, start: int, stop: int) -> int:
        """Bytes of the parameters of such a stage."""
        return sum(self.bytes_of[name] for name in self.parameters_of(start, stop))


def spans(positions: Iterable[int], length: int) -> list[tuple[int, int]]:
    """The ranges of calls between cuts at `positions`."""
    edges = [0, *positions, length]
    return list(pairwise(edges))
