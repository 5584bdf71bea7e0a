"""Which layers of a block could be split together, by following the data through it.

A value comes from a linear layer or convolution if it was computed from that layer's output. If the input of a layer
comes from others, that layer may be a row layer, and the others are its columns. The output of a row layer is full
again, and counts as coming from none.

Also here: pairs of narrow layers beside a linear layer, as LoRA adds them: y = W x + B A x, with A: in -> r and B: r ->
out.
"""

import copy
from collections import defaultdict
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorshard.common.words import join_names
from tensorshard.model.fake_copies import follow_run
from tensorshard.model.provenance import Operation, Provenance
from tensorshard.model.tensors import tensor_leaves
from tensorshard.tensor_parallel.table.layer_kinds import (
    as_channelwise,
    as_splittable,
    is_multihead_attention,
    named_arguments,
)
from tensorshard.tensor_parallel.verify.block_calls import BlockCall
from tensorshard.torch_private.fake_tensors import FakeTensorMode


@dataclass(frozen=True)
class LowRankPairs:
    """The low-rank pairs of a block, each with the layer that it adds to; names are relative to the block.

    Where the layer is split by its outputs, A stays whole, and B is split as the layer is. Where it is split by its
    inputs, A is too, and B stays whole. So nothing as wide as the layer is communicated for the pair.

    Args:
        first: for each A, its layer.
        second: for each B, its layer.
    """

    first: dict[str, str] = field(default_factory=dict)
    second: dict[str, str] = field(default_factory=dict)

    def owner_of(self, name: str) -> str:
        """The module that calls `name`. One that calls only a layer and what is added to it does not count."""
        layer = self.first.get(name) or self.second.get(name) or name
        owner = layer.rpartition(".")[0]
        return owner.rpartition(".")[0] if layer in self.second.values() else owner


def low_rank_pairs(block: nn.Module) -> LowRankPairs:
    """Finds low-rank pairs by their shapes: one linear layer in a module, and in that module narrow ones alone."""
    pairs = LowRankPairs()
    for path, module in block.named_modules():
        linear = {n: s for n, m in module.named_children() if (s := as_splittable(m)) and s.kind == "linear"}
        inside = {n: s for n, m in module.named_modules() if (s := as_splittable(m)) and s.has_rows}
        for name, layer in linear.items():
            narrow = min(layer.inputs, layer.outputs)
            others = {n: s for n, s in inside.items() if n != name}
            first = {n: s.outputs for n, s in others.items() if s.inputs == layer.inputs and s.outputs < narrow}
            second = {n: s.inputs for n, s in others.items() if s.outputs == layer.outputs and s.inputs < narrow}
            if others and first.keys() | second.keys() == others.keys() and set(first.values()) == set(second.values()):
                whole = join_names(path, name)
                pairs.first.update(dict.fromkeys([join_names(path, n) for n in first], whole))
                pairs.second.update(dict.fromkeys([join_names(path, n) for n in second], whole))
    return pairs


@dataclass(frozen=True)
class Region:
    """Layers of a block that would be split together; names are relative to the block.

    Args:
        columns: linear layers, convolutions and per-head embeddings at its start, whose output features or channels
            would be split; or one ``nn.MultiheadAttention``.
        rows: the linear layers and convolutions at its end, whose input features would be split.
        between: parameters in between, which are applied to each rank's own features.
        inputs: indices of tensor inputs of the block that are applied in between as well.
        channelwise: modules in between that seem to compute channel by channel.
        entered: other layers whose full output is used in between without a column layer that reads it. So each rank
            has a part of its gradient. In latent attention, the rotated keys come from such a layer.
        fed: columns that read the output of the layers in `entered`.
        sources: the columns of each row, in the order of the rows.
        added: columns that are the second half of a low-rank pair, each with the column that it is added to.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    between: tuple[str, ...]
    inputs: tuple[int, ...]
    channelwise: tuple[str, ...] = ()
    entered: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()
    sources: tuple[tuple[str, ...], ...] = ()
    added: tuple[tuple[str, str], ...] = ()

    @property
    def first_columns(self) -> tuple[str, ...]:
        """The columns of the first row. If they stay whole, that row may begin a region of its own."""
        return self.sources[0] if self.sources else self.columns

    def __str__(self) -> str:
        return f"{', '.join(self.columns)} -> {', '.join(self.rows)}"


@dataclass(frozen=True)
class Argument:
    """A tensor that a module was called with.

    Args:
        origins: indices of the tensor inputs of the block that it was made of, without a layer in between.
    """

    shape: torch.Size
    origins: frozenset[int]


@dataclass
class Dataflow:
    """What one run of a block showed.

    Args:
        regions: what could be split together.
        called: the layers that were called.
        inputs: groups of linear layers that were called with one tensor, in the order of the calls.
        numbers: for each module, the whole-number attributes that its forward reads (``config.name`` for those of its
            config).
        arguments: for each module, the tensors among the arguments of its first call, by name.
        low_rank: its low-rank pairs.
    """

    regions: list[Region]
    called: set[str]
    inputs: list[tuple[str, ...]]
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    arguments: dict[str, dict[str, Argument]] = field(default_factory=dict)
    low_rank: LowRankPairs = field(default_factory=LowRankPairs)


def follow(block: nn.Module, call: BlockCall, whole: set[str], columns: Container[str] = ()) -> Dataflow:
    """Runs a fake copy of `block` with the arguments of `call`, and proposes what to split.

    Args:
        whole: layers that must not begin a region.
        columns: layers that are known to begin one, whatever their input comes from.
    """

    def watch(fake: FakeTensorMode, fake_copy: nn.Module, samples: Any) -> _LayerSources:
        return _LayerSources(fake, fake_copy, whole, columns, tensor_leaves(samples))

    numbers: dict[str, dict[str, int]] = {}

    def run(copied: nn.Module, samples: Any, sources: _LayerSources) -> None:
        args, kwargs = samples
        with _reads(copied) as read:
            copied(*args, **kwargs)
        numbers.update(read)

    sources = follow_run(block, (call.args, call.kwargs), watch, run)
    return Dataflow(
        sources.regions(), sources.called, sources.shared_inputs(), numbers, sources.arguments, sources.low_rank
    )


@dataclass(frozen=True)
class _Source:
    """Where a value of a block comes from.

    Args:
        kind: "layer": a layer whose output features would be split. "parameter": a parameter outside of the layers that
            can be split. "input": an input of the block, without a layer in between. "full": another layer, whose
            output is full.
        name: of the layer or the parameter.
        index: of the input among the block's tensors.
    """

    kind: str
    name: str = ""
    index: int = -1


_LayersBy = defaultdict[Any, frozenset[str]]


class _LayerSources(Provenance[_Source]):
    """Follows which layers, parameters and inputs of a block its values come from. A layer counts as one step.

    A parameter is followed until it is applied to something. Norms may change their weight first (add one, cast it);
    the result still counts as the parameter.
    """

    def __init__(
        self,
        fake: FakeTensorMode,
        block: nn.Module,
        whole: set[str],
        columns: Container[str],
        inputs: list[torch.Tensor],
    ) -> None:
        super().__init__(fake)
        self._columns = columns
        self.low_rank = low_rank_pairs(block)
        for name, parameter in block.named_parameters():
            self.set(parameter, [_Source("parameter", name)])
        for index, tensor in enumerate(inputs):
            self.add([tensor], frozenset([_Source("input", index=index)]))
        self.called: set[str] = set()
        self._readers: dict[int, list[str]] = {}
        # Columns that values come from, by parameter, by input of the block, and by other layer, that meets them.
        self._met: _LayersBy = defaultdict(frozenset)
        self._met_inputs: _LayersBy = defaultdict(frozenset)
        self._met_full: _LayersBy = defaultdict(frozenset)
        self._consumers: _LayersBy = defaultdict(frozenset)  # the same by layer that reads them
        self._channelwise: _LayersBy = defaultdict(frozenset)  # and by channelwise module
        # Layers with full outputs, by parameter that meets them, and by layer that reads them.
        self._met_by_full: _LayersBy = defaultdict(frozenset)
        self._fed: _LayersBy = defaultdict(frozenset)
        self._inside: list[str] = []
        self._attentions: dict[str, None] = {}
        self.arguments: dict[str, dict[str, Argument]] = {}
        for name, module in block.named_modules():
            module.register_forward_pre_hook(self._called_with(name), with_kwargs=True)
            if is_multihead_attention(module):  # full tensors go in and come out
                module.register_forward_pre_hook(self._entered(name, "attention"))
                module.register_forward_hook(self._left(name, False))
                if name not in whole:
                    self._attentions[name] = None
            layer = as_splittable(module)
            if layer is None and as_channelwise(module) is not None:
                module.register_forward_pre_hook(self._given(name))
            if layer is not None:
                kind = "own linear" if layer.kind == "linear" and layer.own_forward else layer.kind
                module.register_forward_pre_hook(self._entered(name, kind))
                pair_of = self.low_rank.second.get(name, name)
                may_start = pair_of not in whole and layer.kind != "head" and name not in self.low_rank.first
                module.register_forward_hook(self._left(name, may_start or pair_of in columns))

    def _entered(self, name: str, kind: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._inside.append(name)
            self.called.add(name)
            if kind == "linear":
                self.set(args[0], self.of([args[0]]))  # kept, so that its id stays its own
                self._readers.setdefault(id(args[0]), []).append(name)
            if kind in ("linear", "own linear", "convolution"):
                given = self.of(tensor_leaves(args))
                layers = _names(given, "layer")
                self._fed[name] |= _names(given, "full")
                if layers:
                    self._consumers[name] |= layers

        return hook

    def _given(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            layers = _names(self.of(tensor_leaves(args)), "layer")
            if layers:
                self._channelwise[name] |= layers

        return hook

    def _called_with(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in self.arguments:
                return
            self.arguments[name] = {
                key: Argument(value.shape, _inputs(self.of([value])))
                for key, value in named_arguments(module, args, kwargs).items()
                if isinstance(value, torch.Tensor)
            }

        return hook

    def _left(self, name: str, may_start: bool) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._inside.pop()
            starts = may_start and self._starts(name)
            for tensor in tensor_leaves(output):
                self.set(tensor, [_Source("layer" if starts else "full", name)])

        return hook

    def _starts(self, name: str) -> bool:
        """Whether a region begins with `name`. The second half of a low-rank pair is split as its layer is."""
        if name in self.low_rank.second:
            layer = self.low_rank.second[name]
            alike = [layer, *(first for first, other in self.low_rank.first.items() if other == layer)]
        else:
            alike = [name]
        return alike[0] in self._columns or not any(layer in self._consumers for layer in alike)

    def follow(self, operation: Operation) -> None:
        if self._inside:
            return
        sources = self.read_by(operation)
        columns, full = _names(sources, "layer"), _names(sources, "full")
        if full:
            for name in _names(sources, "parameter"):
                self._met_by_full[name] |= full
        if columns:
            for name in _names(sources, "parameter"):
                self._met[name] |= columns
            for name in full:
                self._met_full[name] |= columns
            for index in _inputs(sources):
                self._met_inputs[index] |= columns
        applied = frozenset(source for source in sources if source.kind != "parameter")
        self.add((*operation.outputs, *operation.written), applied or sources)

    def shared_inputs(self) -> list[tuple[str, ...]]:
        """Groups of layers that read the same tensor; each layer is in one group at most.

        A layer that is called several times, each time with other layers, belongs to no group. Computing its group
        together would waste work in some of the calls.
        """
        groups = dict.fromkeys(tuple(dict.fromkeys(names)) for names in self._readers.values())
        neighbours: dict[str, set[tuple[str, ...]]] = {}
        for group in groups:
            for name in group:
                neighbours.setdefault(name, set()).add(group)
        single = [tuple(name for name in group if len(neighbours[name]) == 1) for group in groups]
        return [group for group in single if len(group) > 1]

    def regions(self) -> list[Region]:
        """Rows that share a column are in one region. An ``nn.MultiheadAttention`` is a region by itself."""
        merged: list[tuple[set[str], list[str]]] = []
        for row, columns in self._consumers.items():
            together = [entry for entry in merged if entry[0] & columns]
            merged = [entry for entry in merged if not entry[0] & columns]
            merged.append(
                (
                    set(columns).union(*(entry[0] for entry in together)),
                    [r for entry in together for r in entry[1]] + [row],
                )
            )
        attentions = [
            Region((name,), (join_names(name, "out_proj"),), (), ()) for name in self._attentions if name in self.called
        ]
        return attentions + [self._region(columns, rows) for columns, rows in merged]

    def _region(self, columns: set[str], rows: list[str]) -> Region:
        # What the run did not call (an adapter that is not active) is split as what it will be added to.
        pairs = self.low_rank
        columns = columns | {n for n, layer in pairs.second.items() if layer in columns and n not in self.called}
        unused = {n: layer for n, layer in pairs.first.items() if layer in rows and n not in self.called}
        sources = [self._consumers[unused.get(row, row)] for row in (*rows, *unused)]
        entered = tuple(name for name, met in self._met_full.items() if met & columns)
        between = [name for name, met in self._met.items() if met & columns]
        between += [name for name, met in self._met_by_full.items() if met & set(entered)]
        return Region(
            tuple(sorted(columns)),
            (*rows, *unused),
            tuple(dict.fromkeys(between)),
            tuple(index for index, met in self._met_inputs.items() if met & columns),
            tuple(name for name, met in self._channelwise.items() if met & columns),
            entered,
            tuple(name for name in sorted(columns) if self._fed.get(name, frozenset()) & set(entered)),
            tuple(tuple(sorted(source)) for source in sources),
            tuple((name, layer) for name, layer in pairs.second.items() if {name, layer} <= columns),
        )


def _names(sources: frozenset[_Source], kind: str) -> frozenset[str]:
    return frozenset(source.name for source in sources if source.kind == kind)


def _inputs(sources: frozenset[_Source]) -> frozenset[int]:
    return frozenset(source.index for source in sources if source.kind == "input")


@contextmanager
def _reads(block: nn.Module) -> Iterator[dict[str, dict[str, int]]]:
    """Collects the whole numbers that modules of `block` read from themselves and from their config."""
    reads: dict[str, dict[str, int]] = {}
    for name, module in block.named_modules():
        numbers: dict[str, int] = {}
        reads[name] = numbers
        _watch(module, numbers, "")
        config = vars(module).get("config")
        if config is not None:
            module.config = _watched_copy(config, numbers)
    yield reads


def _watch(owner: Any, numbers: dict[str, int], prefix: str) -> None:
    base: Any = type(owner)

    def read(self: Any, name: str) -> Any:
        value = base.__getattribute__(self, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and (prefix or name in vars(owner)):
            numbers[prefix + name] = value
        return value

    owner.__class__ = type(base.__name__, (base,), {"__getattribute__": read, "__module__": base.__module__})


def _watched_copy(config: Any, numbers: dict[str, int]) -> Any:
    fake_copy = copy.copy(config)
    _watch(fake_copy, numbers, "config.")
    return fake_copy
