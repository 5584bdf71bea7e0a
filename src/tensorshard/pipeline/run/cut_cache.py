"""Which tensors cross the cuts for given inputs, traced once for each shape of the inputs."""

import logging
from collections import Counter, OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.pipeline.cut import Cut, place_calls, unit_stages
from tensorshard.pipeline.trace.call_graph import CallGraph
from tensorshard.pipeline.trace.tracer import Tracer
from tensorshard.random.call_sites import ModelRandomness
from tensorshard.torch_private.modules import every_module
from tensorshard.torch_private.pytree import tree_flatten

logger = logging.getLogger("tensorshard")

_MOST_KNOWN = 64
_MANY_NUMBERS = 8


class CutCache:
    """Runs the model on fake tensors for inputs of new shapes, and keeps the results of the latest ones.

    Every stage has the same inputs, so all find the same result without communication. A Python number among the inputs
    may decide what a model does, so each new number counts as a new shape. If there are many, the log says so.

    Args:
        tracer: runs the whole model; one for all stages of a process.
        cut: made with `tracer`.
        graphs: results of `tracer` that are shared with other users: they are read here, and new ones are added. None
            for none.
    """

    def __init__(self, tracer: Tracer, cut: Cut, graphs: dict[Any, CallGraph] | None = None) -> None:
        self._tracer = tracer
        self._graphs = graphs
        self.cut = cut
        self.stages_of = unit_stages(cut)
        self._known: OrderedDict[Any, Cut] = OrderedDict()
        self._numbers: Counter[Any] = Counter()  # how many runs differed only in numbers
        self._listed: tuple[nn.Module | None, list[nn.Module]] = None, []  # the modules of the last model

    def of(self, inputs: Any, model: nn.Module) -> Cut:
        """The model's run on `inputs`, with gradients and autocast as they are set here, cut into the stages.

        Args:
            inputs: of one micro-batch.
            model: whose modules say which are in training and which in evaluation mode.

        Raises:
            ValueError: with these inputs the model calls units in another order than with those by which it was cut.
                The stages cannot compute them one after the other, or a stage lacks parameters that it would need.
        """
        if model is not self._listed[0]:
            self._listed = model, list(every_module(model).values())
        training = bytes([module.training for module in self._listed[1]])
        mode = (training, torch.is_grad_enabled(), _autocast(self._tracer.device.type))
        key = (input_signature(inputs), mode, self._tracer.numbers_of_step(training))
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        placed = self._placed(self._run(inputs, model, key), inputs)
        self._known[key] = placed
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        self._note_numbers(inputs, mode)
        return placed

    def take_numbers(self, numbers: ModelRandomness) -> None:
        """Lets code between units draw the same numbers in runs on fake tensors as on the stages."""
        self._tracer.take_numbers(numbers)

    def expect_gradients(self) -> None:
        """Forgets the runs so far, in which frozen parameters got no gradients, and takes all for trained ones."""
        self._known.clear()
        self._graphs = None
        self._tracer.train_all()

    def _run(self, inputs: Any, model: nn.Module, key: Any) -> CallGraph:
        graph = None if self._graphs is None else self._graphs.get(key)
        if graph is None:
            self._tracer.follow_modes(model)
            graph = self._tracer.run(inputs)
            if self._graphs is not None and not self._tracer.draws:
                self._graphs[key] = graph
        return graph

    def _note_numbers(self, inputs: Any, mode: Any) -> None:
        tensors = (input_signature(inputs, numbers=False), mode)
        self._numbers[tensors] += 1
        if self._numbers[tensors] == _MANY_NUMBERS and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning(
                "the model was examined %d times for inputs %s that differ in Python numbers alone, by a run on fake "
                "tensors each time: pass such a number as a tensor with an entry for each sample",
                _MANY_NUMBERS,
                _described(inputs),
            )

    def _placed(self, graph: CallGraph, inputs: Any) -> Cut:
        before, now = [c.unit for c in self.cut.graph.calls], [c.unit for c in graph.calls]
        if before != now:
            placed = place_calls(graph, self.cut, self.stages_of)
            if placed is not None:
                return placed
            differs = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), None)
            place = min(len(before), len(now)) if differs is None else differs
            called, was = (repr(units[place]) if place < len(units) else "no unit" for units in (now, before))
            raise ValueError(
                f"with inputs {_described(inputs)} the model calls other units than with the sample inputs that it was "
                f"cut by: call {place + 1} is of {called}, where it was of {was}; the stages that have these units "
                f"cannot compute them in this order: name a module around those that vary as one unit (pp_units), or "
                f"cut it by other sample_inputs"
            )
        placed = Cut(graph, self.cut.positions)
        for stage, span in enumerate(placed.spans):
            missing = graph.parameters_of(*span) - self.cut.parameters(stage)
            if missing:
                raise ValueError(
                    f"with inputs {_described(inputs)} stage {stage} needs the parameter {min(missing)!r}, which it "
                    f"did not need with the sample inputs and therefore does not hold; cut it by inputs like these"
                )
        return placed


Shapes = CutCache
"""The name by which ``tensorshard.pipeline`` has always exported it."""


def input_signature(inputs: Any, *, numbers: bool = True) -> Any:
    """A key that differs for inputs of different shapes. Without `numbers`, ints and floats are left out."""
    leaves, spec = tree_flatten(inputs)
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else type(leaf)
        if not numbers and isinstance(leaf, int | float)
        else repr(leaf)
        for leaf in leaves
    )


def _autocast(device_type: str) -> Any:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _described(inputs: Any) -> str:
    leaves = tree_flatten(inputs)[0]
    return "of shapes " + ", ".join(str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor))
