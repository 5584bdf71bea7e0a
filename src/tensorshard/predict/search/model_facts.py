"""What one forward on fake tensors tells about a model: its blocks' work and outputs. It needs no process group."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tensorshard.common.sampled_loops import SampledLoop, sample_loops
from tensorshard.expert_parallel.search import find_routed_experts
from tensorshard.model.batches import call_model
from tensorshard.model.blocks import find_blocks
from tensorshard.model.fake_copies import make_fake_copy
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.pipeline.trace.tracer import find_units
from tensorshard.predict.operations import FORWARD, Kernel
from tensorshard.predict.operator_costs import cost_of
from tensorshard.predict.search.extrapolate import equal_blocks
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.fake_tensors import (
    grouped_products_of_any_dtype,
    unset_fake_temporarily,
    without_fake_kernel_reports,
)
from tensorshard.weights.files.pretrained_model import PretrainedModel

logger = logging.getLogger("tensorshard.predict")


@dataclass(frozen=True)
class ModelFacts:
    """Facts from one forward of the model.

    Args:
        samples: the number of samples in its batch.
        blocks: how many of the model's blocks were called.
        kernels: the kernels of the blocks, with their counts.
        block_outputs: bytes that all blocks together return.
        largest_block: elements of the trained parameters in the block that has the most.
        largest_share: the part of all trained elements that is in the largest parameter.
        output: the model's output, on fake tensors.
        equal_blocks: names of blocks that are built alike; none if they are few.
        parameters: elements of all parameters.
        narrow: bytes by which frozen 16-bit parameters are smaller than in fp32.
        units: how often the forward calls what a pipeline cannot cut: the most stages that there can be.
        attention: (bytes of queries and outputs, bytes of keys and values) of each call of attention -> how often.
        expert_parts: over how many ranks the experts of all mixtures can be split, 1 included.
        expert_share: the part of all trained elements that is in these experts; of those of the block that has the most
            trained elements; of the largest parameter, 1 or 0.
    """

    samples: int
    blocks: int
    kernels: Counter[Kernel]
    block_outputs: int
    largest_block: int
    largest_share: float = 0.0
    output: Any = None
    equal_blocks: tuple[str, ...] = ()
    parameters: int = 0
    narrow: int = 0
    units: int = 0
    attention: Counter[tuple[int, int]] = field(default_factory=Counter)
    expert_parts: tuple[int, ...] = (1,)
    expert_share: tuple[float, float, float] = (0.0, 0.0, 0.0)


class _BlockKernels(TorchDispatchMode):
    """Counts the kernels that run inside of blocks while the model runs.

    Attributes:
        kernels: of all blocks. calls, outputs: how many blocks were called, and the bytes that they returned.
        attention: as in :class:`ModelFacts`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = SampledLoop()
        self.kernels: Counter[Kernel] = Counter()
        self.attention: Counter[tuple[int, int]] = Counter()
        self.calls = self.outputs = 0
        self._depth = 0  # how many of the blocks that are running are inside of each other

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        cost = cost_of(func, args, kwargs, output) if self._depth else None
        if cost is not None:
            kernel = Kernel(FORWARD, str(func.overloadpacket), cost.dtype, cost.flops, cost.nbytes)
            self.kernels[kernel] += self.loop.times
        if "scaled_dot_product" in func.__name__:
            queries, keys, values = args[:3]
            self.attention[2 * queries.nbytes, keys.nbytes + values.nbytes] += self.loop.times
        return output

    def enter(self, *_: Any) -> None:
        """Called before a block's forward."""
        self._depth += 1

    def leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Called after a block's forward."""
        self._depth -= 1
        self.calls += 1
        self.outputs += sum(t.nbytes for t in tensor_leaves(output)[:1])  # the others may be caches or masks


def model_facts(
    model: nn.Module | Callable[[], nn.Module], inputs: Any, samples: int, units: list[str] | None = None
) -> ModelFacts | None:
    """The facts of one forward; None for a model that cannot be built or run on fake tensors.

    Args:
        inputs: a batch of `samples`.
        units: patterns of the names of units, as in ``Plan(pp_units=...)``.
    """
    try:
        with (
            grouped_products_of_any_dtype(),
            without_fake_kernel_reports(),
            QuickFakeTensorMode() as fake,
            torch.no_grad(),
        ):
            if isinstance(model, nn.Module):
                copied = make_fake_copy(model, fake, torch.device("cpu"))
            else:
                copied = model.build() if isinstance(model, PretrainedModel) else model()
            batch = map_tensors_once(lambda t: torch.empty(t.shape, dtype=t.dtype), inputs)
            equal = equal_blocks(copied)  # before hooks are registered
            facts = replace(_one_forward(copied, batch, samples, units), equal_blocks=equal)
            with unset_fake_temporarily(), torch.enable_grad():
                return _with_experts(facts, copied)
    except Exception as error:
        if not raised_by_model(error):
            raise
        logger.debug("the model was not run on fake tensors: %r", error)
        return None


def _with_experts(facts: ModelFacts, model: nn.Module) -> ModelFacts:
    """The facts, with those about the experts of `model`."""
    try:
        found = find_routed_experts(model, 1)
    except ValueError:  # there are none
        return facts
    counts = math.gcd(*(call.experts for call in found.values()))
    experts = {p for name, call in found.items() for p in call.owners(model.get_submodule(name)) if p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    blocks = [[p for p in block.parameters() if p.requires_grad] for block in find_blocks(model).values()]

    def elements(parameters: Iterable[torch.Tensor]) -> int:
        return sum(p.numel() for p in parameters)

    def share(parameters: list[nn.Parameter]) -> float:
        return elements(experts.intersection(parameters)) / (elements(parameters) or 1)

    largest = max(trained, key=torch.Tensor.numel, default=None)
    shares = share(trained), share(max(blocks, key=elements, default=[])), float(largest in experts)
    parts = tuple(n for n in range(1, counts + 1) if counts % n == 0)
    return replace(facts, expert_parts=parts, expert_share=shares)


def _one_forward(model: nn.Module, batch: Any, samples: int, named: list[str] | None) -> ModelFacts:
    counter = _BlockKernels()
    called: list[nn.Module] = []
    blocks = find_blocks(model)
    sizes = [sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks.values()]
    hooks = [block.register_forward_pre_hook(counter.enter) for block in blocks.values()]
    hooks += [block.register_forward_hook(counter.leave) for block in blocks.values()]
    hooks += [
        unit.register_forward_pre_hook(lambda unit, _: called.append(unit))
        for unit in find_units(model, named).values()
    ]
    with counter, sample_loops(counter.loop):
        output = call_model(model, batch)
    for hook in hooks:
        hook.remove()
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    return ModelFacts(
        samples,
        counter.calls,
        counter.kernels,
        counter.outputs,
        largest_block=max(sizes, default=0),
        largest_share=max(trained, default=0) / (sum(trained) or 1),
        output=output,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        narrow=sum(p.numel() * max(0, 4 - p.itemsize) for p in model.parameters() if not p.requires_grad),
        units=len(called),
        attention=counter.attention,
    )
