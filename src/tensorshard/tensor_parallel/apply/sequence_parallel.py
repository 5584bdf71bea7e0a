"""Sequence parallelism: between split layers, each tensor-parallel rank has only its shard of the sequence.

Norms, dropout and residual sums are then computed once in all, not once on each rank. What they keep for backward is
divided by the number of ranks (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
2022). As in tensor parallelism, only the forwards of instances change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function

from tensorshard.comm import differentiable as collectives
from tensorshard.comm import primitives
from tensorshard.comm.sharding import shard_range, to_local
from tensorshard.layers.split_linear import (
    ActivationSharding,
    SequenceSharded,
    column_linear,
    parallel_linear,
    row_linear,
)
from tensorshard.model.blocks import is_transposed
from tensorshard.model.forward_contexts import RootRole, hook_root
from tensorshard.model.forwards import (
    Forward,
    Role,
    replace_forward,
    replaces_forward,
    roles_of,
    wrap_forward,
)
from tensorshard.model.tensors import TensorSpec, map_tensors, tensor_leaves
from tensorshard.model.whole_sequences import Crossing, Output, WholeSequences
from tensorshard.tensor_parallel.apply.attention import attention_forward
from tensorshard.tensor_parallel.apply.local_shapes import forward_with_full_lengths
from tensorshard.tensor_parallel.apply.split_layers import SharedColumns
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.modules import own_parameters, set_parameter
from tensorshard.torch_private.recomputation import CHECKPOINT_NODE

_LENGTH = "_sequence_length"


@dataclass
class _Sequence:
    """The sequence that a block is computing on, or a model's blocks one after the other.

    Args:
        length: positions of the full sequence; None before the first call.
        is_linked: whether the model's own forward runs. A block that a user's code calls by itself takes and returns
            full sequences.
    """

    dim: int
    group: dist.ProcessGroup
    length: int | None = None
    is_linked: bool = False

    def full_length(self) -> int:
        """Number of positions on all ranks together."""
        assert self.length is not None
        return self.length

    def own_length(self) -> int:
        """Number of positions on this rank."""
        return shard_range(self.full_length(), self.group.size(), self.group.rank())[1]

    def unflattened(self, tensor: torch.Tensor, positions: int) -> torch.Tensor:
        """`tensor`, with samples and positions as two dimensions if they are one ([samples * positions, features])."""
        flat = self.dim == 1 and tensor.ndim == 2 and positions > 0 and tensor.size(0) % positions == 0
        return tensor.unflatten(0, (-1, positions)) if flat else tensor

    def sharding(self) -> SequenceSharded:
        """Which positions each rank has."""
        return SequenceSharded.of_length(self.dim, self.full_length(), self.group)


def apply_sequence_parallel(
    model: nn.Module,
    splits: Mapping[str, SequenceSplit],
    group: dist.ProcessGroup,
    *,
    shared_inputs: Iterable[Sequence[str]] = (),
    whole_units: bool = True,
    between: Mapping[str, SequenceSplit] | None = None,
) -> WholeSequences:
    """Makes blocks of `model` compute on their shards of a sequence.

    Args:
        model: one that :func:`tensorshard.tensor_parallel.apply.apply_table.apply_tensor_parallel` has split.
        splits: of its blocks, by name; "" is the model itself.
        shared_inputs: as for tensor parallelism: names of column layers that are called with the same tensor.
        whole_units: whether all parameters of a block are gathered when its forward begins. They are not if modules
            inside of it are gathered one by one (ZeRO 3 with units by name).
        between: splits of the blocks whose outputs stay shards on their way to the next stage of a pipeline.

    Returns:
        How sequences go from stage to stage.
    """
    flows: dict[int, _Sequence] = {}
    for name, split in splits.items():
        flow = flows.setdefault(split.dim, _Sequence(split.dim, group))
        prefix = f"{name}." if name else ""
        shared = [
            tuple(n.removeprefix(prefix) for n in names) for names in shared_inputs if names[0].startswith(prefix)
        ]
        _split_block(model.get_submodule(name), name, split, flow, shared, whole_units)
    link, unlink = (partial(_set_linked, list(flows.values()), linked) for linked in (True, False))
    hook_root(model, RootRole.SEQUENCES_LINKED, before=link, after=unlink, always=True)
    if not between:
        return WholeSequences()
    return _StageSequences(
        {
            (name, index): flows.setdefault(split.dim, _Sequence(split.dim, group))
            for name, split in between.items()
            for index in split.outputs
        }
    )


def _split_block(
    block: nn.Module,
    name: str,
    split: SequenceSplit,
    flow: _Sequence,
    shared_inputs: Iterable[Sequence[str]],
    whole_units: bool,
) -> None:
    inner = _Sequence(split.dim, flow.group)  # its own, so that recomputation does not depend on the model's
    for names in _read_together(split, shared_inputs):
        layers = [block.get_submodule(key) for key in names]
        if any(map(_runs_own_forward, layers)):
            _gather_own_inputs(names, layers, inner, gathers=split.columns[names[0]])
            continue
        columns = _SequenceColumns(layers, inner, gathers=split.columns[names[0]])
        for index, layer in enumerate(layers):
            replace_forward(layer, Role.SEQUENCE_LAYER, partial(columns.forward, index))
    own_biases = set()
    for key in split.rows:
        row = block.get_submodule(key)
        if _runs_own_forward(row):
            wrap_forward(row, Role.SEQUENCE_LAYER, partial(_own_row_forward, inner))
            own_biases.add(f"{key}.bias")
            continue
        replace_forward(row, Role.SEQUENCE_LAYER, partial(_row_forward, row, is_transposed(row), inner))
    for key, leaves in split.attentions.items():
        attention = block.get_submodule(key)
        assert isinstance(attention, nn.MultiheadAttention)
        replace_forward(attention, Role.SEQUENCE_LAYER, partial(_attention_forward, attention, leaves, inner))
    for key, leaves in split.modules.items():
        module = block.get_submodule(key)
        copied = split.copied.get(key, ())
        wrap_forward(module, Role.SEQUENCE_INPUTS, partial(_gathering_forward, leaves, copied, inner))
    for key, (gathered, cut) in split.whole.items():
        module = block.get_submodule(key)
        wrap_forward(module, Role.SEQUENCE_WHOLE, partial(_whole_forward, gathered, cut, inner))
    partial_names = [key for key in split.partial if key not in own_biases]
    for owner, places in _partial_places(block, partial_names, together=whole_units):
        known: set[str] = set()
        summing = partial(_summing_forward, name or type(block).__name__, places, flow.group, known)
        wrap_forward(owner, Role.SEQUENCE_GRADIENTS, summing)
    if split.reshapes:
        around = partial(forward_with_full_lengths, lambda: (inner.own_length(), inner.full_length()), split.dim)
        wrap_forward(block, Role.SEQUENCE_SHAPES, around)
    wrap_forward(block, Role.SEQUENCE_LENGTH, partial(_block_forward, inner))
    # Hooks run outside of recomputation, so a recomputed block keeps only its shard of the sequence.
    what = name or type(block).__name__
    block.register_forward_pre_hook(partial(_enter, what, split, flow), with_kwargs=True)
    block.register_forward_hook(partial(_leave, split, flow))


def _read_together(split: SequenceSplit, shared_inputs: Iterable[Sequence[str]]) -> list[list[str]]:
    """The column layers that read the sequence, in groups that gather one tensor."""
    rest = dict(split.columns)
    groups = []
    for names in shared_inputs:
        together = [name for name in names if rest.get(name)]
        if len(together) > 1:
            groups.append(together)
            for name in together:
                del rest[name]
    return [*groups, *([name] for name in rest)]


# -- the new forwards --


class _SequenceColumns(SharedColumns):
    """Column layers whose outputs have all positions, though each rank has only its shard of the input."""

    def __init__(self, layers: Sequence[nn.Module], sequence: _Sequence, *, gathers: bool) -> None:
        super().__init__(layers, sequence.group)
        self._sequence = sequence
        self._gathers = gathers

    def _compute(self, indices: Iterable[int], input: torch.Tensor) -> list[torch.Tensor]:
        if not self._gathers:
            return super()._compute(indices, input)
        given = self._sequence.unflattened(input, self._sequence.own_length())
        outputs = super()._compute(indices, given)
        return outputs if given is input else [output.flatten(0, 1) for output in outputs]

    def _sharding(self) -> ActivationSharding | None:
        return self._sequence.sharding() if self._gathers else None  # else a module around them has gathered it


def _row_forward(layer: nn.Module, transposed: bool, sequence: _Sequence, input: torch.Tensor) -> torch.Tensor:
    weight = to_local(layer.weight)  # type: ignore[arg-type]
    bias = None if layer.bias is None else to_local(layer.bias)  # type: ignore[arg-type]
    weight = weight.t() if transposed else weight
    given = sequence.unflattened(input, sequence.length or 0)
    sharding = SequenceSharded.of_length(sequence.dim, given.size(sequence.dim), sequence.group)
    output = row_linear(given, weight, bias, sharding)
    return output if given is input else output.flatten(0, 1)


# A layer whose class has its own forward (Falcon's) runs it on this rank's shard of the weight. If its input is
# gathered here, the input's gradient is summed here too. Its output is summed, its bias added, and then cut.


def _runs_own_forward(layer: nn.Module) -> bool:
    return Role.SPLIT_LAYER in roles_of(layer) and not replaces_forward(layer)


def _gather_own_inputs(
    names: Sequence[str], layers: Sequence[nn.Module], sequence: _Sequence, *, gathers: bool
) -> None:
    if not gathers:
        raise ValueError(
            f"{', '.join(names)} have forwards of their own, and a module around them would gather their inputs"
        )
    for layer in layers:
        wrap_forward(layer, Role.SEQUENCE_LAYER, partial(_own_column_forward, sequence))


def _own_column_forward(
    sequence: _Sequence, forward: Forward, /, input: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    given = sequence.unflattened(input, sequence.own_length())
    full = collectives.gather(given, sequence.dim, sequence.group, size=sequence.full_length())
    output: torch.Tensor = forward(full if given is input else full.flatten(0, 1), *args, **kwargs)
    return output


def _own_row_forward(sequence: _Sequence, forward: Forward, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    output = forward(*args, **kwargs)
    given = sequence.unflattened(output, sequence.full_length())
    shard = collectives.scatter(given, sequence.dim, sequence.group)
    return shard if given is output else shard.flatten(0, 1)


def _attention_forward(
    module: nn.MultiheadAttention, leaves: tuple[int, ...], sequence: _Sequence, /, *args: Any, **kwargs: Any
) -> Any:
    """A split attention. Some of its inputs are shards. Its ``out_proj`` is a row layer, and scatters."""
    tensors = tensor_leaves((args, kwargs))
    sharded = {id(tensors[index]) for index in leaves}

    def column(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if id(input) not in sharded:
            return parallel_linear(input, weight, bias, 1, sequence.group)
        return column_linear(input, [(weight, bias)], sequence.sharding())[0]

    return attention_forward(module, sequence.group, column, *args, **kwargs)


def _gathering_forward(
    leaves: tuple[int, ...],
    copied: tuple[int, ...],
    sequence: _Sequence,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    def full(shard: torch.Tensor) -> torch.Tensor:
        return collectives.gather_for_sum(shard, sequence.dim, sequence.group, size=sequence.length)

    args, kwargs = _replace_leaves((args, kwargs), copied, lambda t: collectives.copy(t, sequence.group))
    args, kwargs = _replace_leaves((args, kwargs), leaves, full)
    return forward(*args, **kwargs)


def _whole_forward(
    gathered: tuple[int, ...],
    cut: tuple[int, ...],
    sequence: _Sequence,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    def full(shard: torch.Tensor) -> torch.Tensor:
        return collectives.gather(shard, sequence.dim, sequence.group, size=sequence.length)

    args, kwargs = _replace_leaves((args, kwargs), gathered, full)
    output = forward(*args, **kwargs)
    return _replace_leaves(output, cut, lambda t: collectives.scatter(t, sequence.dim, sequence.group))


def _block_forward(sequence: _Sequence, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    sequence.length = kwargs.pop(_LENGTH)
    return forward(*args, **kwargs)


# -- the ends of a block --


def _enter(
    name: str, split: SequenceSplit, flow: _Sequence, block: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """Cuts a block's input, if it comes in full, and passes the length of the sequence on to the block."""

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim != split.ndim:
            raise ValueError(
                f"{name} was given a tensor {list(tensor.shape)}, and expected {split.ndim} dimensions, of which "
                f"dimension {split.dim} is the sequence; give such sequences, or set sequence_parallel=False"
            )
        if split.scatters or _is_alone(flow):
            flow.length = tensor.size(split.dim)
            if tensor.size(split.dim) < flow.group.size():
                raise ValueError(
                    f"{name} was given {tensor.size(split.dim)} positions along dimension {split.dim}, which cannot be "
                    f"split over tp={flow.group.size()} ranks; give longer sequences, or set sequence_parallel=False"
                )
            return collectives.scatter(tensor, split.dim, flow.group)
        if flow.length is None or tensor.size(split.dim) != flow.own_length():
            raise RuntimeError(
                f"{name} was given {tensor.size(split.dim)} positions along dimension {split.dim}, and expected this "
                f"rank's shard of the {flow.length} that the block before it had: the model calls its blocks in "
                f"another way than when it was examined; set sequence_parallel=False"
            )
        return tensor

    args, kwargs = _replace_leaves((args, kwargs), (split.input,), shard)
    return args, {**kwargs, _LENGTH: flow.length}


def _leave(split: SequenceSplit, flow: _Sequence, block: nn.Module, args: Any, output: Any) -> Any:
    """Gathers a block's outputs, if the next block does not take shards."""
    if not split.gathers and not _is_alone(flow):
        return output
    return _replace_leaves(
        output, split.outputs, lambda shard: collectives.gather(shard, split.dim, flow.group, size=flow.length)
    )


def _set_linked(flows: Sequence[_Sequence], linked: bool, *_: Any) -> None:
    for flow in flows:
        flow.is_linked = linked


def _is_alone(flow: _Sequence) -> bool:
    """Whether a block is called by other code than the model's. In backward it is called as it was in the forward."""
    return not flow.is_linked and not is_in_backward()


def _replace_leaves(tree: Any, indices: tuple[int, ...], replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`tree` with the tensors at `indices` replaced, counted in order. A tensor that occurs twice is replaced once."""
    places = count()
    made: dict[int, torch.Tensor] = {}

    def given(tensor: torch.Tensor) -> torch.Tensor:
        if next(places) not in indices:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = replacement(tensor)
        return made[id(tensor)]

    return map_tensors(given, tree)


# -- between the stages of a pipeline --


class _StageSequences(WholeSequences):
    """Each rank sends its shard of what blocks return to the rank at its place in the next stage.

    Args:
        sequences: those of which blocks return shards.
    """

    def __init__(self, sequences: Mapping[Output, _Sequence]) -> None:
        self._crossing = _CrossingShards(sequences)

    def crossing(self, inputs: Any) -> Crossing:
        return self._crossing


class _CrossingShards(Crossing):
    """What is handed to the next stage: shards of the outputs that blocks split, all of other tensors."""

    def __init__(self, sequences: Mapping[Output, _Sequence]) -> None:
        self._sequences = sequences

    def spec(self, spec: TensorSpec, output: Output) -> TensorSpec:
        sequence = self._sequences.get(output)
        if sequence is None:
            return spec
        length = shard_range(spec.shape[sequence.dim], sequence.group.size(), sequence.group.rank())[1]
        return spec.with_length(sequence.dim, length)

    def held(self, spec: TensorSpec, output: Output) -> TensorSpec:
        return self.spec(spec, output)

    def joined(self, part: torch.Tensor, spec: TensorSpec, output: Output) -> torch.Tensor:
        sequence = self._sequences.get(output)
        if sequence is not None:
            sequence.length = spec.shape[sequence.dim]  # no block of this stage has seen the whole sequence
        return part


# -- parameters that see a shard of the sequence --


class _SumGradients(Function):
    """The identity. In backward the gradients of all tensors are summed over the ranks, in one message."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dtypes = {grad.dtype for grad in grads}
        wide = dtypes.pop() if len(dtypes) == 1 else torch.float32
        message = torch.cat([grad.reshape(-1).to(wide) for grad in grads])
        if torch.is_grad_enabled():  # create_graph=True
            message = collectives.reduce(message, ctx.group)
        else:
            primitives.all_reduce(message, ctx.group)
        sums = message.split([grad.numel() for grad in grads])
        return None, *(total.view(grad.shape).to(grad.dtype) for total, grad in zip(sums, grads, strict=True))


_Places = list[tuple[nn.Module, str]]


def _partial_places(block: nn.Module, names: Iterable[str], *, together: bool) -> list[tuple[nn.Module, _Places]]:
    """Where some parameters of a block are registered, grouped by the module whose forward sums their gradients."""
    places = [(block.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    if together:
        return [(block, places)] if places else []
    owners = {id(owner): owner for owner, _ in places}
    return [(owner, [place for place in places if place[0] is owner]) for owner in owners.values()]


def _summing_forward(
    block: str,
    places: _Places,
    group: dist.ProcessGroup,
    known: set[str],
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls `forward` on parameters whose gradients are summed over the ranks.

    Args:
        known: has `block` once its graph was looked at.
    """
    parameters = [own_parameters(owner).get(key) for owner, key in places]
    trained = [
        (place, tensor)
        for place, tensor in zip(places, parameters, strict=True)
        if tensor is not None and tensor.requires_grad
    ]
    if not torch.is_grad_enabled() or not trained:
        return forward(*args, **kwargs)
    summed = _SumGradients.apply(group, *(to_local(tensor) for _, tensor in trained))
    for ((owner, key), _), alias in zip(trained, summed, strict=True):
        set_parameter(owner, key, alias)
    try:
        output = forward(*args, **kwargs)
    finally:
        for (owner, key), tensor in trained:
            set_parameter(owner, key, tensor)
    if block not in known:
        known.add(block)
        _check_graph(block, (args, kwargs), output)
    return output


def _check_graph(block: str, given: Any, output: Any) -> None:
    """Refuses a block that makes its graph in backward, of parameters whose gradients nobody would sum."""
    waiting = [tensor.grad_fn for tensor in tensor_leaves(output) if tensor.grad_fn is not None]
    seen: set[Any] = {tensor.grad_fn for tensor in tensor_leaves(given)}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == CHECKPOINT_NODE:
            raise RuntimeError(
                f"{block} recomputes by torch.utils.checkpoint with use_reentrant=True, which makes its graph in "
                f"backward, out of reach of sequence_parallel=True: take use_reentrant=False (in transformers, "
                f"gradient_checkpointing_kwargs={{'use_reentrant': False}}), or Plan(recompute='full') in its place"
            )
        waiting += [function for function, _ in node.next_functions if function is not None]
