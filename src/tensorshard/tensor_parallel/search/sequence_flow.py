"""Where a block's stream of positions goes, found by running a fake copy of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorshard.common.dotted_names import join_names
from tensorshard.model.fake_copies import follow_run
from tensorshard.model.provenance import Operation, Provenance
from tensorshard.model.tensors import storage_key, tensor_leaves
from tensorshard.tensor_parallel.search.low_rank import LowRankPairs, low_rank_pairs
from tensorshard.tensor_parallel.table.layer_kinds import (
    as_splittable,
    is_convolution,
    is_multihead_attention,
    named_arguments,
)
from tensorshard.tensor_parallel.table.layer_styles import Column, ColwiseGather, Rowwise, Style
from tensorshard.tensor_parallel.table.styles import Heads, Sum
from tensorshard.tensor_parallel.verify.block_calls import BlockCall
from tensorshard.torch_private.fake_tensors import FakeTensorMode


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
