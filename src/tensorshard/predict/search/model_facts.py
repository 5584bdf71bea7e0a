"""What one forward on fake tensors tells about a model: its blocks' work and outputs. It needs no process group."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorshard.common.repetitions import FewTurns, shortened
from tensorshard.model.batches import call_model
from tensorshard.model.blocks import find_blocks
from tensorshard.model.fake_copies import make_fake_copy
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.pipeline.trace.call_graph import CallGraph
from tensorshard.predict.operations import FORWARD, Kernel
from tensorshard.predict.operator_costs import cost_of
from tensorshard.predict.search.data_collectives import Bucket, find_buckets
from tensorshard.predict.search.fewer_blocks import equal_blocks
from tensorshard.predict.search.stage_costs import StageCosts, call_graph
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.fake_tensors import (
    grouped_products_of_any_dtype,
    without_fake_kernel_reports,
)
from tensorshard.weights.files.pretrained_model import PretrainedModel


@dataclass(frozen=True)
class ModelFacts:
    """Facts from one forward of the model.

    Args:
        samples: the number of samples in its batch.
        trained: how many parameters are trained.
        blocks: how many of the model's blocks were called.
        kernels: the kernels of the blocks, with their counts.
        block_outputs: bytes that all blocks together return.
        largest_block: elements of the trained parameters in the block that has the most.
        largest_share: the part of all trained elements that is in the largest parameter.
        buckets: the trained parameters that share messages along the data axes.
        stages: where the model can be cut into stages; None if that is not known.
        output: the model's output, on fake tensors.
        equal_blocks: names of blocks that are built alike; none if they are few.
    """

    samples: int
    trained: int
    blocks: int
    kernels: Counter[Kernel]
    block_outputs: int
    largest_block: int
    largest_share: float = 0.0
    buckets: tuple[Bucket, ...] = ()
    stages: StageCosts | None = None
    output: Any = None
    equal_blocks: tuple[str, ...] = ()


class _Kernels(TorchDispatchMode):
    """Counts the kernels that run inside of blocks, and those of each unit of a pipeline, while the model runs.

    Attributes:
        depth: how many of the blocks that are running are inside of each other.
        inside: the same of the units.
        kernels: of all blocks. calls, outputs: how many blocks were called, and the bytes that they returned.
        of_units: each called unit's name, and the kernels from the unit before it to its own end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = self.inside = 0
        self.turns = FewTurns()
        self.kernels: Counter[Kernel] = Counter()
        self.calls = 0
        self.outputs = 0
        self.of_units: list[tuple[str, Counter[Kernel]]] = []
        self._since: Counter[Kernel] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        cost = cost_of(func, args, kwargs, output)
        if cost is not None:
            name = str(func.overloadpacket)
            kernel = Kernel(FORWARD, name, cost.dtype, cost.flops, cost.nbytes, cost.convolution)
            self._since[kernel] += self.turns.times
            if self.depth:
                self.kernels[kernel] += self.turns.times
        return output

    def enter(self, *_: Any) -> None:
        """Called before a block's forward."""
        self.depth += 1

    def leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Called after a block's forward."""
        self.depth -= 1
        self.calls += 1
        self.outputs += sum(t.nbytes for t in tensor_leaves(output)[:1])  # the others may be caches or masks

    def enter_unit(self, *_: Any) -> None:
        """Called before a unit's forward."""
        self.inside += 1

    def leave_unit(self, name: str, *_: Any) -> None:
        """Called after the forward of the unit `name`."""
        self.inside -= 1
        if not self.inside:  # not a unit that is a part of another
            self.of_units.append((name, self._since))
            self._since = Counter()


def model_facts(
    model: nn.Module | Callable[[], nn.Module], inputs: Any, samples: int, fixed: Mapping[str, Any] | None = None
) -> ModelFacts | None:
    """The facts of one forward; None for a model that cannot be built or run on fake tensors.

    Args:
        inputs: a batch of `samples`.
        fixed: fields of a Plan that the user gave; None outside of a search for plans.
    """
    try:
        with grouped_products_of_any_dtype(), without_fake_kernel_reports():
            with QuickFakeTensorMode() as fake, torch.no_grad():
                if isinstance(model, nn.Module):
                    ours = make_fake_copy(model, fake, torch.device("cpu"))
                else:
                    ours = model.build() if isinstance(model, PretrainedModel) else model()
                batch = map_tensors_once(lambda t: torch.empty(t.shape, dtype=t.dtype), inputs)
                buckets = find_buckets(ours, (fixed or {}).get("shard_units"))
                equal = equal_blocks(ours)
            graph = None if fixed is None else call_graph(ours, inputs, fixed)
            with fake, torch.no_grad():
                facts = _one_forward(ours, batch, samples, graph)
        return replace(facts, buckets=tuple(buckets), equal_blocks=equal)
    except Exception:  # a model's code may raise anything for tensors without values
        return None


def _one_forward(model: nn.Module, batch: Any, samples: int, graph: CallGraph | None) -> ModelFacts:
    counter = _Kernels()
    blocks = find_blocks(model)
    sizes = [sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks.values()]
    hooks = [block.register_forward_pre_hook(counter.enter) for block in blocks.values()]
    hooks += [block.register_forward_hook(counter.leave) for block in blocks.values()]
    for name in () if graph is None else {call.unit for call in graph.calls}:
        unit = model.get_submodule(name)
        hooks.append(unit.register_forward_pre_hook(counter.enter_unit))
        hooks.append(unit.register_forward_hook(partial(counter.leave_unit, name)))
    with counter, shortened(counter.turns):
        output = call_model(model, batch)
    for hook in hooks:
        hook.remove()
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    return ModelFacts(
        samples,
        len(trained),
        counter.calls,
        counter.kernels,
        counter.outputs,
        largest_block=max(sizes, default=0),
        largest_share=max(trained, default=0) / (sum(trained) or 1),
        stages=None if graph is None else StageCosts(graph, samples, counter.of_units),
        output=output,
    )
