"""What one forward on fake tensors tells about a model: its blocks' work and outputs. It needs no process group.

Also here: extrapolation of what a deep model takes, from the same with 3 and 4 of its equal blocks; their tables.

Memory is the largest of several sums, each of which grows linearly with the blocks, and so do the parts of a step's
time. So both lines are lower bounds of the full estimate, and near it.
"""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tensorshard.common.sampled_loops import SampledLoop, sample_loops
from tensorshard.common.words import is_inside
from tensorshard.expert_parallel.search import find_routed_experts
from tensorshard.model.batches import call_model
from tensorshard.model.blocks import find_blocks
from tensorshard.model.fake_copies import make_fake_copy
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.pipeline.trace.tracer import find_units
from tensorshard.predict.operation_ledger import FORWARD, Kernel
from tensorshard.predict.operator_costs import cost_of
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.table.table import TensorTable, VerifiedTable
from tensorshard.tensor_parallel.verify.block_kinds import group_equal_blocks
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.fake_tensors import (
    grouped_products_of_any_dtype,
    unset_fake_temporarily,
    without_fake_kernel_reports,
)
from tensorshard.weights.files.pretrained_model import PretrainedModel

KEPT = (3, 4)
"""How many equal blocks the two models keep: the second one more than the first."""

_WORTH_IT = 12  # with at least so many equal blocks, running two short models is faster than running the full one
logger = logging.getLogger("tensorshard.predict")


@dataclass(frozen=True)
class FewerBlocks:
    """Builds a model, and leaves some of its blocks out.

    Args:
        build: makes the whole model. left_out: names of blocks.
    """

    build: Callable[[], nn.Module]
    left_out: tuple[str, ...]

    def __call__(self) -> nn.Module:
        model = self.build()
        for name in self.left_out:
            owner, _, key = name.rpartition(".")
            nn.Module.__delattr__(model.get_submodule(owner), key)
        return model


def equal_blocks(model: nn.Module) -> tuple[str, ...]:
    """The names of the largest group of blocks that are built alike and in one list; none if they are few."""
    lists: dict[str, dict[str, nn.Module]] = defaultdict(dict)
    for name, block in find_blocks(model).items():
        lists[name.rpartition(".")[0]][name] = block
    groups = [group for blocks in lists.values() for group in group_equal_blocks(blocks)]
    most = max(groups, key=len, default=[])
    return tuple(most) if len(most) >= _WORTH_IT else ()


def extrapolate(few: float, more: float, blocks: Sequence[str]) -> float:
    """The value for a model with all equal `blocks`, on the line through those for the two numbers of `KEPT` blocks."""
    return more + (len(blocks) - KEPT[1]) * (more - few)


def without_blocks(table: VerifiedTable, blocks: Sequence[str], kept: int) -> VerifiedTable:
    """The table of a model with the first `kept` of its equal `blocks`. The last one that is kept takes the sequence
    split of the full model's last block, which gathers the parts of a sequence."""
    left_out = blocks[kept:]

    def is_there(name: str) -> bool:
        return not is_inside(name, left_out)

    sequence = {name: split for name, split in table.sequence.items() if is_there(name)}
    if blocks[-1] in table.sequence:
        sequence[blocks[kept - 1]] = table.sequence[blocks[-1]]
    shared = [names for names in table.shared_inputs if all(map(is_there, names))]
    return replace(table, shared_inputs=shared, sequence=sequence)


def with_all_blocks(table: VerifiedTable, blocks: Sequence[str], kept: int) -> VerifiedTable | None:
    """The table of the full model, from one that was found for a model with the first `kept` of its equal `blocks`;
    None if these were not split alike. Its shares of split parameters are those of the short model.

    Every block that was left out is split like the second one: the first and the last one may also cut and gather
    sequences.
    """
    like, last = blocks[1], blocks[kept - 1]
    styles = [
        {name.removeprefix(block): style for name, style in table.plan.entries.items() if is_inside(name, [block])}
        for block in blocks[:kept]
    ]
    if any(one != styles[1] for one in styles):
        return None
    entries = dict(table.plan.entries)
    shared = list(table.shared_inputs)
    for block in blocks[kept:]:
        entries |= {block + name: style for name, style in styles[1].items()}
        shared += [
            tuple(_renamed(name, like, block) for name in names)
            for names in table.shared_inputs
            if all(is_inside(name, [like]) for name in names)
        ]
    if (like in table.sequence) != (last in table.sequence):
        return None
    sequence: dict[str, SequenceSplit] = {}
    for name, split in table.sequence.items():
        if name == last:  # in the order of the calls
            sequence |= dict.fromkeys(blocks[kept - 1 : -1], table.sequence[like]) | {blocks[-1]: split}
        else:
            sequence[name] = split
    return replace(table, plan=TensorTable(entries), shared_inputs=shared, sequence=sequence)


def _renamed(name: str, block: str, other: str) -> str:
    """The name in `other` of what `name` is in `block`."""
    return other + name.removeprefix(block)


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
        calls = find_routed_experts(model, 1)
    except ValueError:  # there are none
        return facts
    counts = math.gcd(*(call.experts for call in calls.values()))
    experts = {p for name, call in calls.items() for p in call.owners(model.get_submodule(name)) if p.requires_grad}
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
