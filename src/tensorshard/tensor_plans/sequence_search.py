"""The search for sequence parallelism: what of a split model's blocks can compute on parts of a sequence.

As for the table itself, ways are proposed from the flow of the data, and a way counts when the block computes the same
numbers on simulated ranks, forward and backward, as on one device.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tensorshard.tensor_plans.block_checks import BlockChecks, styles_inside
from tensorshard.tensor_plans.capture import BlockCall, Capture, storage_key, tensor_leaves
from tensorshard.tensor_plans.copies import blank, copy_with
from tensorshard.tensor_plans.layers import as_splittable
from tensorshard.tensor_plans.sequence import SequenceSplit
from tensorshard.tensor_plans.styles import COLUMN_KINDS, Style
from tensorshard.tensor_plans.table import starred
from tensorshard.tensor_plans.units import ModelRun, find_units, structure_of
from tensorshard.tensor_plans.verify import MismatchError

_MOST_TRIES = 32


class NoSequenceParallelError(ValueError):
    """No block of a model can compute on parts of a sequence."""


@dataclass(frozen=True)
class SplitBlocks:
    """What is known of a model's blocks once its table was blocks.

    Args:
        styles: of everything in the model.
        shared_inputs: names of column layers that read the same tensor.
        sliced_inputs: for blocks that are handed something split by another (a bias per head, say), which of their
            tensor inputs, by their indices, and along which dimension.
    """

    styles: Mapping[str, Style]
    shared_inputs: Sequence[Sequence[str]]
    sliced_inputs: Mapping[str, Mapping[int, int]]


def find_sequence_splits(
    model: nn.Module, blocks: SplitBlocks, run: ModelRun, checks: BlockChecks
) -> tuple[dict[str, SequenceSplit], dict[str, str]]:
    """How the blocks of `model`, split already, can compute on parts of a sequence.

    Args:
        run: how the model calls its blocks.
        checks: the checks of its blocks, for a number of ranks.

    Returns:
        The split of each block that can, by name, and why others cannot.

    Raises:
        NoSequenceParallelError: none can; names the reasons.
    """
    units = find_units(model)
    known: dict[tuple[object, ...], SequenceSplit | str] = {}
    splits: dict[str, SequenceSplit] = {}
    refused: dict[str, str] = {}
    for name, call in run.calls.items():
        inside = styles_inside(name, blocks.styles)
        sliced = blocks.sliced_inputs.get(name, {})
        structure = (structure_of(units[name], call), tuple(inside.items()), tuple(sliced.items()))
        if structure not in known:
            prefix = f"{name}." if name else ""
            shared = [tuple(n.removeprefix(prefix) for n in s) for s in blocks.shared_inputs if s[0].startswith(prefix)]
            known[structure] = _search_block(units[name], call, inside, sliced, checks, shared)
        found = known[structure]
        if isinstance(found, SequenceSplit):
            splits[name] = found
        else:
            refused[name] = found
    reasons = {starred(name): reason for name, reason in refused.items()}
    if not splits:
        told = "\n".join(f"  {name or type(model).__name__}: {reason}" for name, reason in reasons.items())
        raise NoSequenceParallelError(
            f"sequence_parallel=True: no block of this {type(model).__name__} can be split along a sequence:\n{told}\n"
            f"set sequence_parallel=False"
        )
    return link_splits(splits, run.capture), reasons


def link_splits(splits: Mapping[str, SequenceSplit], capture: Capture) -> dict[str, SequenceSplit]:
    """`splits` with what happens between the blocks: a part is handed on where the next block takes it as it is."""
    whole = {name for name, split in splits.items() if any((name, i) in capture.escaped for i in split.outputs)}
    whole |= capture.repeated & set(splits)
    for name, call in capture.calls.items():
        for index, (provider, output) in call.providers.items():
            if provider not in splits or output not in splits[provider].outputs:
                continue
            takes = name in splits and splits[name].input == index and splits[name].dim == splits[provider].dim
            if not takes or name in capture.repeated:
                whole.add(provider)
    linked = {}
    for name, split in splits.items():
        provider, output = capture.calls[name].providers.get(split.input, ("", -1))
        handed = provider in splits and output in splits[provider].outputs and provider not in whole
        linked[name] = split.linked(scatters=not handed, gathers=name in whole)
    return linked


def _search_block(
    block: nn.Module,
    call: BlockCall,
    styles: dict[str, Style],
    sliced_inputs: Mapping[int, int],
    checks: BlockChecks,
    shared_inputs: Sequence[Sequence[str]],
) -> SequenceSplit | str:
    rows = [name for name, style in styles.items() if style.kind == "rowwise"]
    if not rows:
        return "it has no row layer, whose output could be scattered"
    check = checks.of(block, call)
    reason = "none of its inputs looks like a sequence"
    tries = 0
    candidates = list(_candidates(check.inputs, checks.size))
    for index, dim in candidates:
        length = check.inputs[index].shape[dim]
        flow = _follow(block, call, styles, index)
        if not flow.columns or not flow.outputs_of(dim, length):
            continue
        for split in _ways(flow, index, dim, check.inputs[index].shape):
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


def _candidates(inputs: Sequence[torch.Tensor], size: int) -> Iterator[tuple[int, int]]:
    """The inputs that may be a stream of positions with features, and the dimension of the positions."""
    for index, tensor in sorted(enumerate(inputs), key=lambda entry: not entry[1].requires_grad):
        if tensor.is_floating_point() and tensor.ndim >= 3:
            for dim in (*range(1, tensor.ndim - 1), 0):
                if tensor.shape[dim] >= size:
                    yield index, dim


@dataclass
class _Flow:
    """Where a block's stream of positions goes.

    Args:
        columns: column layers that read it. rows: row layers, whose outputs belong to it.
        unsplit: other linear layers that read it, whose outputs are whole.
        entries, exits: for each module, the shapes of its tensor inputs and outputs that are of the stream, by their
            indices.
        partial: parameters that are applied to it.
        outputs: the shapes of the block's tensor outputs that are of the stream, by their indices.
    """

    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    unsplit: list[str] = field(default_factory=list)
    entries: dict[str, dict[int, torch.Size]] = field(default_factory=dict)
    exits: dict[str, dict[int, torch.Size]] = field(default_factory=dict)
    partial: dict[str, None] = field(default_factory=dict)
    outputs: dict[int, torch.Size] = field(default_factory=dict)

    def outputs_of(self, dim: int, length: int) -> tuple[int, ...]:
        """The outputs that are as long as the sequence."""
        return _as_long(self.outputs, dim, length)


def _ways(flow: _Flow, index: int, dim: int, shape: torch.Size) -> Iterator[SequenceSplit]:
    """Where the sequence may be put together: by each column layer, or by the module around several.

    First with all layers that are not split applied to parts of the sequence, then with the modules around these run on
    the whole of it.
    """
    length = shape[dim]
    for around in ((), _owners(flow.unsplit)):
        whole = {}
        for owner in around:
            ends = _as_long(flow.entries[owner], dim, length), _as_long(flow.exits.get(owner, {}), dim, length)
            if all(ends):
                whole[owner] = ends
        if around and not whole:
            return
        owners = {o: names for o, names in _owners(flow.columns).items() if not _is_inside_any(o, whole)}
        choices = []
        for owner in owners:
            leaves = _as_long(flow.entries.get(owner, {}), dim, length)
            choices.append([(), leaves] if owner and leaves else [()])
        ways = sorted(product(*choices), key=lambda way: sum(bool(leaves) for leaves in way))
        ways.sort(key=lambda way: len({bool(leaves) for leaves in way}) > 1)  # all alike first
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
                tuple(name for name in flow.rows if not _is_inside_any(name, whole)),
                tuple(name for name in flow.partial if not _is_inside_any(name, whole)),
            )


def _owners(layers: Sequence[str]) -> dict[str, list[str]]:
    """Layers by the module that they are in."""
    owners: dict[str, list[str]] = {}
    for name in layers:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    return owners


def _is_inside_any(name: str, modules: Mapping[str, object]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _as_long(shapes: Mapping[int, torch.Size], dim: int, length: int) -> tuple[int, ...]:
    return tuple(leaf for leaf, shape in shapes.items() if len(shape) > dim and shape[dim] == length)


def _follow(block: nn.Module, call: BlockCall, styles: Mapping[str, Style], index: int) -> _Flow:
    """Runs a fake copy of `block` and notes where its input `index` goes, column layers apart."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        twin = copy_with(block, blank).eval()
        for parameter in twin.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        args, kwargs = tree_map_only(torch.Tensor, _Once(), (call.args, call.kwargs))
        stream = _Stream(twin, styles, tensor_leaves((args, kwargs))[index])
        with stream:
            outputs = tensor_leaves(twin(*args, **kwargs))
    stream.flow.outputs = {leaf: output.shape for leaf, output in enumerate(outputs) if stream.holds(output)}
    return stream.flow


class _Once:
    """Fake tensors for meta ones, one for a repeated one."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            self._made[id(tensor)] = blank("", tensor)
        return self._made[id(tensor)]


class _Stream(TorchDispatchMode):
    """Labels what is computed from a stream; a row layer's output belongs to it, a column layer's does not."""

    def __init__(self, block: nn.Module, styles: Mapping[str, Style], start: torch.Tensor) -> None:
        super().__init__()
        self.flow = _Flow()
        self._styles = styles
        self._kept: list[torch.Tensor] = [start]  # so that storages are not used again
        self._stream = {storage_key(start)}
        # What was made of parameters alone, by storage: scaled or shifted weights of norms.
        self._made_of = {storage_key(p): frozenset([name]) for name, p in block.named_parameters()}
        self._inside_column = 0
        for name, module in block.named_modules():
            style = styles.get(name)
            kind = style.kind if style is not None else ""
            if kind in COLUMN_KINDS:
                module.register_forward_pre_hook(self._column_called(name))
                module.register_forward_hook(self._column_returned)
            elif kind == "rowwise":
                module.register_forward_hook(self._row_returned(name))
            elif kind == "heads":  # it takes whole sequences, and puts out whole ones
                module.register_forward_pre_hook(self._unsplit_called(f"{name}.out_proj"))
            elif kind in ("", "colwise_gather") and (layer := as_splittable(module)) and layer.kind == "linear":
                module.register_forward_pre_hook(self._unsplit_called(name))
            module.register_forward_pre_hook(self._entered(name), with_kwargs=True)
            module.register_forward_hook(self._returned(name))

    def _column_called(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._inside_column += 1
            if self.holds(args[0]) and name not in self.flow.columns:
                self.flow.columns.append(name)

        return hook

    def _unsplit_called(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self.holds(args[0]) and name not in self.flow.unsplit:
                self.flow.unsplit.append(name)

        return hook

    def _column_returned(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        self._inside_column -= 1
        self._kept.append(output)
        self._stream.discard(storage_key(output))

    def _row_returned(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self._kept.append(output)
            self._stream.add(storage_key(output))
            self._made_of.pop(storage_key(output), None)
            if name not in self.flow.rows:
                self.flow.rows.append(name)
                if module.bias is not None:
                    self.flow.partial[f"{name}.bias"] = None

        return hook

    def _entered(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            leaves = enumerate(tensor_leaves((args, kwargs)))
            found = {index: leaf.shape for index, leaf in leaves if self.holds(leaf)}
            self.flow.entries.setdefault(name, found)

        return hook

    def _returned(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = {index: leaf.shape for index, leaf in enumerate(tensor_leaves(output)) if self.holds(leaf)}
            self.flow.exits.setdefault(name, found)

        return hook

    def holds(self, tensor: Any) -> bool:
        """Whether `tensor` was computed from the stream."""
        return isinstance(tensor, torch.Tensor) and storage_key(tensor) in self._stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._inside_column:
            return output
        inputs = tensor_leaves((args, kwargs))
        made_of = frozenset().union(*(self._made_of.get(storage_key(t), frozenset()) for t in inputs))
        outputs = tensor_leaves(output)
        self._kept += outputs
        if any(map(self.holds, inputs)):
            self._stream.update(storage_key(t) for t in outputs)
            for name in made_of:
                style = self._styles.get(name) or self._styles.get(name.rpartition(".")[0])
                if style is None or not style.sums_gradients:
                    self.flow.partial[name] = None
        elif made_of:
            for tensor in outputs:
                self._made_of[storage_key(tensor)] = made_of
        return output
