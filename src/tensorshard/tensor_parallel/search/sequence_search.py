"""The search for sequence parallelism: which of a split model's blocks can compute on parts of a sequence, and how.

Then modules between the blocks are tried, such as a last norm: what acts on each position by itself can stand before
the first block or after the last one, so that whole sequences are only put together where they are needed.

As for the table, ways are proposed from the flow of the data. A way is right if the block computes the same numbers on
simulated ranks as on one device, forward and backward.

Also here: where a block's stream of positions goes, found by running a fake copy of it.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from tensorshard.common.words import is_inside, join_names
from tensorshard.model.fake_copies import follow_run
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.provenance import Operation, Provenance
from tensorshard.model.tensors import storage_key, tensor_leaves
from tensorshard.tensor_parallel.search.dataflow import LowRankPairs, low_rank_pairs
from tensorshard.tensor_parallel.table.layer_kinds import (
    as_splittable,
    is_convolution,
    is_multihead_attention,
    named_arguments,
)
from tensorshard.tensor_parallel.table.layer_styles import Column, ColwiseGather, Rowwise, Style
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.table.styles import Heads, Sum
from tensorshard.tensor_parallel.table.table import starred
from tensorshard.tensor_parallel.verify.block_calls import BlockCall, Capture, InTraining, capture_calls
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.block_checks import BlockChecks, styles_inside
from tensorshard.tensor_parallel.verify.block_kinds import block_kinds
from tensorshard.tensor_parallel.verify.comparison import MismatchError
from tensorshard.tensor_parallel.verify.model_run import ModelRun, find_units
from tensorshard.torch_private.fake_tensors import FakeTensorMode
from tensorshard.torch_private.modules import NormBase, forward_hooks

_MOST_TRIES = 32


@dataclass
class StreamFlow:
    """Where a block's stream of positions goes.

    Args:
        columns: column layers that read it.
        rows: row layers, whose outputs belong to it.
        attentions: split ``nn.MultiheadAttention`` modules that read it; for each, the shapes of its inputs that belong
            to the stream, by index.
        direct: for each module around column layers, the indices of its tensor inputs that these layers read unchanged.
        unsplit: other linear layers that read it, whose outputs are whole; and split convolutions, which need their
            neighbours in a sequence.
        entries, exits: for each module, the shapes of its tensor inputs and outputs that belong to the stream, by
            index.
        beside: for each module, the indices of its other tensor inputs that may have gradients.
        partial: parameters that are applied to it.
        outputs: the shapes of the block's tensor outputs that belong to the stream, by index.
        low_rank: the block's low-rank pairs.
    """

    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    attentions: dict[str, dict[int, torch.Size]] = field(default_factory=dict)
    direct: dict[str, dict[int, None]] = field(default_factory=dict)
    unsplit: list[str] = field(default_factory=list)
    entries: dict[str, dict[int, torch.Size]] = field(default_factory=dict)
    exits: dict[str, dict[int, torch.Size]] = field(default_factory=dict)
    beside: dict[str, tuple[int, ...]] = field(default_factory=dict)
    partial: dict[str, None] = field(default_factory=dict)
    outputs: dict[int, torch.Size] = field(default_factory=dict)
    low_rank: LowRankPairs = field(default_factory=LowRankPairs)

    def outputs_of(self, dim: int, length: int) -> tuple[int, ...]:
        """Indices of the outputs that are as long as the sequence."""
        return leaves_as_long(self.outputs, dim, length)


def leaves_as_long(shapes: Mapping[int, torch.Size], dim: int, length: int) -> tuple[int, ...]:
    """Indices of the `shapes` that have `length` elements along `dim`."""
    return tuple(leaf for leaf, shape in shapes.items() if len(shape) > dim and shape[dim] == length)


def follow_stream(block: nn.Module, call: BlockCall, styles: Mapping[str, Style], index: int) -> StreamFlow:
    """Runs a fake copy of `block` and notes where its input `index` goes, up to column layers."""

    def watch(fake: FakeTensorMode, fake_copy: nn.Module, samples: Any) -> _StreamSources:
        return _StreamSources(fake, fake_copy, styles, tensor_leaves(samples)[index])

    def run(copied: nn.Module, samples: Any, sources: _StreamSources) -> None:
        args, kwargs = samples
        outputs = tensor_leaves(copied(*args, **kwargs))
        sources.flow.outputs = {leaf: output.shape for leaf, output in enumerate(outputs) if sources.holds(output)}

    return follow_run(block, (call.args, call.kwargs), watch, run).flow


_STREAM = ""
"""The source that is the stream; the others are names of parameters."""


class _StreamSources(Provenance[str]):
    """Follows what is computed from a stream. A row layer's output belongs to it, a column layer's does not.

    A tensor with the shape of one that belongs to it belongs to it too, since on each rank that is the shape of a part.
    A parameter is followed until it is applied to the stream: norms may scale or shift their weights first.
    """

    def __init__(
        self, fake: FakeTensorMode, block: nn.Module, styles: Mapping[str, Style], start: torch.Tensor
    ) -> None:
        super().__init__(fake)
        self.flow = StreamFlow(low_rank=low_rank_pairs(block))
        self._styles = styles
        for name, parameter in block.named_parameters():
            self.set(parameter, [name])
        self.set(start, [_STREAM])
        self._inside_column = 0
        self._given: dict[str, dict[int, int]] = {}  # for each module, its inputs by storage
        for name, module in block.named_modules():
            style = styles.get(name)
            if is_convolution(module) and isinstance(style, Column | Rowwise):
                module.register_forward_pre_hook(self._unsplit_called(name))
            elif isinstance(style, Column):
                module.register_forward_pre_hook(self._column_called(name))
                module.register_forward_hook(self._column_returned)
            elif isinstance(style, Rowwise):
                if not style.sum_grad:  # else its output is only used with split features (Mamba's x_proj)
                    module.register_forward_hook(self._row_returned(name))
            elif isinstance(style, Heads):
                module.register_forward_pre_hook(self._attention_called(name), with_kwargs=True)
                module.register_forward_hook(self._attention_returned(name, bool(module.out_proj.bias is not None)))
            elif is_multihead_attention(module):  # it reads its layers' weights directly
                module.register_forward_pre_hook(self._unsplit_attention_called(name), with_kwargs=True)
            elif isinstance(style, Sum) or ((style is None or isinstance(style, ColwiseGather)) and _is_linear(module)):
                module.register_forward_pre_hook(self._unsplit_called(name))
            module.register_forward_pre_hook(self._entered(name), with_kwargs=True)
            module.register_forward_hook(self._returned(name))

    def _column_called(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._inside_column += 1
            if self.holds(args[0]) and name not in self.flow.columns:
                self.flow.columns.append(name)
            owner = self.flow.low_rank.owner_of(name)
            for index, key in self._given.get(owner, {}).items():
                if key == storage_key(args[0]):
                    self.flow.direct.setdefault(owner, {})[index] = None
                    break

        return hook

    def _attention_called(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside_column += 1
            named = named_arguments(module, args, kwargs)
            sequences = {id(named[key]) for key in ("query", "key", "value")}
            shapes = {
                index: leaf.shape
                for index, leaf in enumerate(tensor_leaves((args, kwargs)))
                if id(leaf) in sequences and self.holds(leaf)
            }
            if shapes:
                self.flow.attentions.setdefault(name, shapes)

        return hook

    def _attention_returned(self, name: str, biased: bool) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._inside_column -= 1
            for tensor in tensor_leaves(output)[1:]:  # the attention weights
                self.set(tensor, [])
            if name in self.flow.attentions:
                self._row_put_out(join_names(name, "out_proj"), tensor_leaves(output)[0], biased)

        return hook

    def _unsplit_called(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self.holds(args[0]) and name not in self.flow.unsplit:
                self.flow.unsplit.append(name)

        return hook

    def _unsplit_attention_called(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            layer = join_names(name, "out_proj")
            if any(map(self.holds, named_arguments(module, args, kwargs).values())) and layer not in self.flow.unsplit:
                self.flow.unsplit.append(layer)

        return hook

    def _column_returned(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        self._inside_column -= 1
        self.set(output, [])

    def _row_returned(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self._row_put_out(name, output, module.bias is not None)

        return hook

    def _row_put_out(self, name: str, output: torch.Tensor, biased: bool) -> None:
        self.set(output, [_STREAM])
        if name not in self.flow.rows:
            self.flow.rows.append(name)
            if biased:
                self.flow.partial[f"{name}.bias"] = None

    def _entered(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            leaves = tensor_leaves((args, kwargs))
            self._given[name] = {index: storage_key(leaf) for index, leaf in enumerate(leaves)}
            shapes = {index: leaf.shape for index, leaf in enumerate(leaves) if self.holds(leaf)}
            self.flow.entries.setdefault(name, shapes)
            beside = (index for index, leaf in enumerate(leaves) if index not in shapes and leaf.is_floating_point())
            self.flow.beside.setdefault(name, tuple(beside))

        return hook

    def _returned(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            shapes = {index: leaf.shape for index, leaf in enumerate(tensor_leaves(output)) if self.holds(leaf)}
            self.flow.exits.setdefault(name, shapes)

        return hook

    def holds(self, tensor: Any) -> bool:
        """Whether `tensor` was computed from the stream."""
        return isinstance(tensor, torch.Tensor) and _STREAM in self.of([tensor])

    def follow(self, operation: Operation) -> None:
        if self._inside_column:
            return
        sources = self.of(operation.inputs)
        if _STREAM in sources:
            for name in sorted(sources - {_STREAM}):
                style = self._styles.get(name) or self._styles.get(name.rpartition(".")[0])
                if style is None or not style.sums_gradients:
                    self.flow.partial[name] = None
            sources = frozenset([_STREAM])
        self.add((*operation.outputs, *operation.written), sources)


def _is_linear(module: nn.Module) -> bool:
    layer = as_splittable(module)
    return layer is not None and layer.kind == "linear"


class NoSequenceParallelError(ValueError):
    """No block of a model can compute on parts of a sequence."""


@dataclass(frozen=True)
class SplitBlocks:
    """What is known of a model's blocks from the search for its table.

    Args:
        styles: of everything in the model.
        shared_inputs: names of column layers that read the same tensor.
        sliced_inputs: for each block that gets something split by another (a bias per head, say), the indices of these
            tensor inputs, each with its dimension.
    """

    styles: Mapping[str, Style]
    shared_inputs: Sequence[Sequence[str]]
    sliced_inputs: Mapping[str, Mapping[int, int]]


def find_sequence_splits(
    model: nn.Module, blocks: SplitBlocks, run: ModelRun, checks: BlockChecks, *, between: bool = True
) -> tuple[dict[str, SequenceSplit], dict[str, str]]:
    """How the blocks of `model`, which is split already, can compute on parts of a sequence.

    Args:
        run: how the model calls its blocks.
        checks: the checks of its blocks, for a number of ranks.
        between: whether modules between the blocks may do so as well.

    Returns:
        The split of each block that can, by name, and why others cannot.

    Raises:
        NoSequenceParallelError: no block can. The message names the reasons.
    """
    units, run, checks = _sequence_units(model, blocks.styles, run, checks)
    known: dict[object, SequenceSplit | str] = {}
    splits: dict[str, SequenceSplit] = {}
    refused: dict[str, str] = {}
    for name, call in run.calls.items():
        inside = styles_inside(name, blocks.styles)
        sliced = blocks.sliced_inputs.get(name, {})
        key = (run.kinds[name], tuple(inside.items()), tuple(sliced.items()))
        if key not in known:
            prefix = f"{name}." if name else ""
            shared = [tuple(n.removeprefix(prefix) for n in s) for s in blocks.shared_inputs if s[0].startswith(prefix)]
            known[key] = _search_block(name, units[name], call, inside, sliced, checks, shared)
        outcome = known[key]
        if isinstance(outcome, SequenceSplit):
            splits[name] = outcome
        else:
            refused[name] = outcome
    reasons = {starred(name): reason for name, reason in refused.items()}
    if not splits:
        why = "\n".join(f"  {name or type(model).__name__}: {reason}" for name, reason in reasons.items())
        why = why or "  none of its blocks runs alone, on random numbers"
        raise NoSequenceParallelError(
            f"sequence_parallel=True: no block of this {type(model).__name__} can be split along a sequence:\n{why}\n"
            f"set sequence_parallel=False"
        )
    # Guessed floating-point inputs may be features without positions. Token ids and images cannot.
    features = run.guessed and all(t.is_floating_point() and t.ndim < 4 for t in tensor_leaves(run.inputs))
    if features and not any(checks.of(n).relates_positions(s.input, s.dim) for n, s in splits.items()):
        raise NoSequenceParallelError(
            f"sequence_parallel=True: nothing of this {type(model).__name__} relates positions of a sequence to each "
            f"other, and it may be meant for [samples, features]; give parallelize(sample_inputs=...) sequences, or "
            f"set sequence_parallel=False"
        )
    if between:
        _add_between(model, splits, blocks.styles, run.capture, checks.size)
    return link_splits(splits, run.capture), reasons


def _sequence_units(
    model: nn.Module, styles: Mapping[str, Style], run: ModelRun, checks: BlockChecks
) -> tuple[dict[str, nn.Module], ModelRun, BlockChecks]:
    """What may compute on parts of a sequence, how it is called, and its checks: mostly the blocks of the table's
    search.

    If that search took the model as one, these are the innermost members of lists that have several split layers. A
    list may have a single member that is called again and again (ALBERT's layer is).
    """
    units = find_units(model)
    if "" not in units:
        return units, run, checks
    members = {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for key, _ in module.named_children()
    }
    several = [name for name in members if sum(key.startswith(f"{name}.") for key in styles) > 1]
    names = sorted(name for name in several if not any(other.startswith(f"{name}.") for other in several))
    inner = {name: model.get_submodule(name) for name in names}
    capture = capture_calls(model, names, run.inputs)
    if not capture.calls:
        return units, run, checks
    inside = ModelRun(capture, run.inputs, block_kinds(inner, capture.calls), guessed=run.guessed)
    return inner, inside, BlockChecks(inner, inside, checks.size)


def link_splits(splits: Mapping[str, SequenceSplit], capture: Capture) -> dict[str, SequenceSplit]:
    """`splits` in the order of the calls, linked: a block's output stays split if the next block takes it as it is.

    Modules between blocks are left out if a sequence would be cut and put together again for them alone.
    """
    order = [name for name in capture.called if name in splits]
    previous = dict(zip(order[1:], order, strict=False))
    whole = {name for name, split in splits.items() if any((name, i) in capture.read_outside for i in split.outputs)}
    whole |= capture.repeated & set(splits)
    for name, call in capture.called.items():
        for index, (provider, output) in call.providers.items():
            if provider not in splits or output not in splits[provider].outputs:
                continue
            takes = name in splits and splits[name].input == index and splits[name].dim == splits[provider].dim
            if takes and (splits[name].is_between or splits[provider].is_between):
                # Code may depend on the length, and no block in between may begin another sequence.
                takes = previous.get(name) == provider and (provider, output) not in capture.measured
            if not takes or name in capture.repeated:
                whole.add(provider)
    linked = {}
    for name in order:
        split = splits[name]
        provider, output = capture.called[name].providers.get(split.input, ("", -1))
        handed = provider in splits and output in splits[provider].outputs and provider not in whole
        linked[name] = split.linked(scatters=not handed, gathers=name in whole)
    runs: list[list[str]] = []  # from where a sequence is cut to where it is put together
    for name in order:
        if linked[name].scatters or linked[previous[name]].gathers:
            runs.append([])
        runs[-1].append(name)
    kept = {name for run in runs if not all(splits[n].is_between for n in run) for name in run}
    return linked if len(kept) == len(linked) else link_splits({n: splits[n] for n in order if n in kept}, capture)


def _add_between(
    model: nn.Module, splits: dict[str, SequenceSplit], styles: Mapping[str, Style], capture: Capture, size: int
) -> None:
    """Adds to `splits` those of the modules that stand next to one of them and act on each position by itself."""
    dims = {split.dim for split in splits.values()}
    left = [name for name in capture.called if name not in capture.calls and name not in capture.repeated]
    left = [name for name in left if not any(is_inside(key, [name]) for key in styles)]
    while following := [name for name in left if _is_next_to(name, splits, capture)]:
        left = [name for name in left if name not in following]
        for name in following:
            training = InTraining(True, capture.training.inside(name).written)
            split = _search_between(model.get_submodule(name), capture.called[name], dims, size, training)
            if split is not None:
                splits[name] = split


def _is_next_to(name: str, splits: Mapping[str, SequenceSplit], capture: Capture) -> bool:
    """Whether the module `name` takes an output of one of `splits`, or what it returns is the sequence of one."""
    takes = any(provider in splits for provider, _ in capture.called[name].providers.values())
    return takes or any(
        capture.called[other].providers.get(split.input, ("", -1))[0] == name for other, split in splits.items()
    )


def _search_between(
    module: nn.Module, call: BlockCall, dims: Container[int], size: int, training: InTraining
) -> SequenceSplit | None:
    if forward_hooks(module):  # code of the user's, which would see parts
        return None
    try:
        check = BlockCheck(module, call, size, training=training)
    except Exception as error:  # any error of the module on random inputs
        if not raised_by_model(error):
            raise
        return None
    for index, dim in _candidates(module, check.inputs, size):
        shape = check.inputs[index].shape
        flow = follow_stream(module, call, {}, index)
        outputs = flow.outputs_of(dim, shape[dim])
        split = SequenceSplit(len(shape), dim, index, outputs, {}, {}, {}, (), tuple(flow.partial))
        if dim not in dims or not outputs or _normalizes_parts(module, flow, split):
            continue
        with suppress(MismatchError):
            check.check({}, sequence={"": split.linked(scatters=True, gathers=True)})
            return split
    return None


def _search_block(
    name: str,
    block: nn.Module,
    call: BlockCall,
    styles: dict[str, Style],
    sliced_inputs: Mapping[int, int],
    checks: BlockChecks,
    shared_inputs: Sequence[Sequence[str]],
) -> SequenceSplit | str:
    check = checks.of(name)
    reason = "none of its inputs looks like a sequence"
    tries = 0
    candidates = list(_candidates(block, check.inputs, checks.size))
    for index, dim in candidates:
        length = check.inputs[index].shape[dim]
        flow = follow_stream(block, call, styles, index)
        if not flow.outputs_of(dim, length):
            continue
        for split in _ways(block, styles, flow, index, dim, check.inputs[index].shape):
            if _normalizes_parts(block, flow, split):
                if tries == 0:
                    reason = "a batch or instance normalization in it takes statistics over positions"
                continue
            tries += 1
            if tries > _MOST_TRIES:
                return reason
            try:
                check.check(
                    styles, sliced_inputs, shared_inputs, sequence={"": split.linked(scatters=True, gathers=True)}
                )
            except MismatchError as error:
                if (index, dim) == candidates[0]:
                    reason = f"split along dimension {dim}, {error}"
                continue
            return split
    return reason


def _candidates(block: nn.Module, inputs: Sequence[torch.Tensor], size: int) -> Iterator[tuple[int, int]]:
    """Inputs that may be a stream of positions with features, each with the dimension of the positions.

    Splitting samples instead of positions is right too, but there may be fewer samples than ranks.
    """
    samples_second = any(is_multihead_attention(m) and not m.batch_first for m in block.modules())
    for index, tensor in sorted(enumerate(inputs), key=lambda entry: not entry[1].requires_grad):
        if tensor.is_floating_point() and tensor.ndim >= 3:
            dims = range(tensor.ndim - 1)
            for dim in dims if samples_second else (*dims[1:], 0):
                if tensor.shape[dim] >= size:
                    yield index, dim


def _ways(
    block: nn.Module, styles: Mapping[str, Style], flow: StreamFlow, index: int, dim: int, shape: torch.Size
) -> Iterator[SequenceSplit]:
    """Where to gather the sequence, the most likely way first.

    First come the ways of :func:`_plain_ways`. In the next ones, code in the block asks for the length of its part
    although layers of the block have gathered all of it, or modules around column layers get more than the sequence.
    """
    plain = list(_plain_ways(block, styles, flow, index, dim, shape))
    yield from plain
    yield from (replace(way, reshapes=True) for way in plain if way.columns and not way.modules and not way.whole)
    for way in plain:
        copied = {owner: flow.beside[owner] for owner in way.modules if flow.beside.get(owner)}
        if copied:
            yield replace(way, copied=copied)


def _plain_ways(
    block: nn.Module, styles: Mapping[str, Style], flow: StreamFlow, index: int, dim: int, shape: torch.Size
) -> Iterator[SequenceSplit]:
    """Where to gather the sequence: in each column layer, or in the module around several.

    At first all layers that are not split run on parts of the sequence. Then the modules around these run on the whole
    of it. Last, split ``nn.MultiheadAttention`` modules, or all that is not split, run on the whole of it too.
    """
    length = shape[dim]
    unsplit = list(_owners(flow, flow.unsplit))
    with_attentions = list(_owners(flow, [*flow.unsplit, *(join_names(name, "out_proj") for name in flow.attentions)]))
    for around in _distinct([], unsplit, with_attentions, [*dict.fromkeys([*unsplit, *_unsplit_parts(block, styles)])]):
        whole = {}
        for owner in around:
            ends = (
                leaves_as_long(flow.entries.get(owner, {}), dim, length),
                leaves_as_long(flow.exits.get(owner, {}), dim, length),
            )
            if all(ends) and owner and not is_inside(owner, [o for o in around if o not in ("", owner)]):
                whole[owner] = ends
        if (around or not (flow.columns or flow.attentions)) and not whole:
            continue
        attentions = {
            name: leaves_as_long(shapes, dim, length)
            for name, shapes in flow.attentions.items()
            if not is_inside(name, whole)
        }
        if not all(attentions.values()):
            continue
        owners = {o: names for o, names in _owners(flow, flow.columns).items() if not is_inside(o, whole)}
        choices = []
        for owner in owners:
            leaves = leaves_as_long(flow.entries.get(owner, {}), dim, length)
            direct = tuple(leaf for leaf in leaves if leaf in flow.direct.get(owner, {}))
            choices.append(list(dict.fromkeys([(), direct, leaves])) if owner else [()])
        ways = sorted(product(*choices), key=lambda way: sum(bool(leaves) for leaves in way))
        ways.sort(key=lambda way: len({bool(leaves) for leaves in way}) > 1)  # ways that treat all alike come first
        for way in ways:
            gathered = dict(zip(owners, way, strict=True))
            yield SequenceSplit(
                len(shape),
                dim,
                index,
                flow.outputs_of(dim, length),
                {name: not gathered[owner] for owner, names in owners.items() for name in names},
                {owner: leaves for owner, leaves in gathered.items() if leaves},
                whole,
                tuple(name for name in flow.rows if not is_inside(name, whole)),
                tuple(name for name in flow.partial if not is_inside(name, whole)),
                attentions=attentions,
            )


def _distinct(*lists: Sequence[str]) -> list[Sequence[str]]:
    return [names for index, names in enumerate(lists) if names not in lists[:index]]


def _owners(flow: StreamFlow, layers: Sequence[str]) -> dict[str, list[str]]:
    """Layers, grouped by the module that they are in. A layer with its low-rank pairs counts as one."""
    owners: dict[str, list[str]] = {}
    for name in layers:
        owners.setdefault(flow.low_rank.owner_of(name), []).append(name)
    return owners


def _unsplit_parts(block: nn.Module, styles: Mapping[str, Style]) -> list[str]:
    """Parts of `block` in which nothing is split, and whose own code may mix positions."""
    return [
        name
        for name, part in block.named_children()
        if (any(True for _ in part.children()) or any(p.ndim > 1 for p in part.parameters()))
        and not any(is_inside(key, [name]) for key in styles)
    ]


def _normalizes_parts(block: nn.Module, flow: StreamFlow, way: SequenceSplit) -> bool:
    """Whether statistics over positions would be computed on a part in training, which the check by numbers misses."""
    return any(
        isinstance(module, NormBase) and flow.entries.get(name) and not is_inside(name, way.whole)
        for name, module in block.named_modules()
    )
