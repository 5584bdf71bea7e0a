"""Which layers of a block could be split together, by following the data through it.

Each linear layer's output gets a label, which operations carry on. A linear layer whose input carries labels
could be a row layer; those labels are its columns. What a row layer puts out is whole again and carries none.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorshard.modules.fake_copies import blank, copy_with
from tensorshard.modules.stacked_experts import stand_in
from tensorshard.modules.tensors import storage_key, tensor_leaves
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable, is_multihead_attention, named_arguments
from tensorshard.tensor_parallel.verify.block_calls import BlockCall
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_tensors import FakeTensorMode
from tensorshard.torch_private.pytree import tree_map_only


@dataclass(frozen=True)
class Region:
    """Layers of a block that would be split together; names are relative to the block.

    Args:
        columns: linear layers and per-head embeddings at its start, whose output features would be split; or one
            ``nn.MultiheadAttention``.
        rows: the linear layers at its end, whose input features would be.
        between: parameters that are applied in between, to what each rank has of its own.
        inputs: tensor inputs of the block that are, by their index.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    between: tuple[str, ...]
    inputs: tuple[int, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.columns)} -> {', '.join(self.rows)}"


@dataclass(frozen=True)
class Argument:
    """A tensor that a module was called with.

    Args:
        origins: of which tensor inputs of the block it was made without a layer in between.
    """

    shape: torch.Size
    origins: frozenset[int]


@dataclass
class Dataflow:
    """What one run of a block showed.

    Args:
        regions: what could be split together.
        called: the layers that were called.
        inputs: linear layers that were called with one tensor, in the order of the calls.
        numbers: for each module, the whole-number attributes that its forward reads (``config.name`` for its
            config's).
        arguments: for each module, the tensors among the arguments of its first call, by name.
    """

    regions: list[Region]
    called: set[str]
    inputs: list[tuple[str, ...]]
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    arguments: dict[str, dict[str, Argument]] = field(default_factory=dict)


def follow(block: nn.Module, call: BlockCall, whole: set[str]) -> Dataflow:
    """Runs a fake copy of `block` as `call` says and proposes what to split.

    Args:
        whole: layers that are not to begin a region.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_copy = copy_with(block, blank).eval()
        stand_in(fake_copy)
        for parameter in fake_copy.parameters():  # without gradients, some modules take shortcuts past their layers
            parameter.requires_grad_(parameter.is_floating_point())
        args, kwargs = tree_map_only(torch.Tensor, lambda t: blank("", t), (call.args, call.kwargs))
        labels = _Labels(fake_copy, whole, tensor_leaves((args, kwargs)))
        with _reads(fake_copy) as numbers, labels:
            fake_copy(*args, **kwargs)
    return Dataflow(labels.regions(), labels.called, labels.shared_inputs(), numbers, labels.arguments)


class _Labels(TorchDispatchMode):
    def __init__(self, block: nn.Module, whole: set[str], inputs: list[torch.Tensor]) -> None:
        super().__init__()
        # Of which inputs of the block a tensor was made without a layer in between, by storage.
        self._origins: dict[int, frozenset[int]] = {storage_key(t): frozenset([i]) for i, t in enumerate(inputs)}
        self._met_inputs: dict[int, frozenset[str]] = {}
        self._labels: dict[int, frozenset[str]] = {}  # by storage: views carry their base's labels
        self._kept: list[torch.Tensor] = []  # so that storages are not used again
        self._parameters = {storage_key(p): name for name, p in block.named_parameters()}
        self.called: set[str] = set()
        self._readers: dict[int, list[str]] = {}
        self._met: dict[str, frozenset[str]] = {}
        self._consumers: dict[str, frozenset[str]] = {}
        self._inside: list[str] = []
        self._attentions: dict[str, None] = {}
        self.arguments: dict[str, dict[str, Argument]] = {}
        for name, module in block.named_modules():
            module.register_forward_pre_hook(self._called_with(name), with_kwargs=True)
            if is_multihead_attention(module):  # whole tensors go in and come out
                module.register_forward_pre_hook(self._entered(name, "attention"))
                module.register_forward_hook(self._left(name, False))
                if name not in whole:
                    self._attentions[name] = None
            layer = as_splittable(module)
            if layer is not None:
                module.register_forward_pre_hook(self._entered(name, layer.kind))
                module.register_forward_hook(self._left(name, name not in whole and layer.kind != "head"))

    def _entered(self, name: str, kind: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._inside.append(name)
            self.called.add(name)
            if kind == "linear":
                self._kept.append(args[0])
                self._readers.setdefault(id(args[0]), []).append(name)
            found = self._of(tensor_leaves(args))
            if found and kind == "linear":
                self._consumers[name] = self._consumers.get(name, frozenset()) | found

        return hook

    def _called_with(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in self.arguments:
                return
            self.arguments[name] = {
                key: Argument(value.shape, self._origins.get(storage_key(value), frozenset()))
                for key, value in named_arguments(module, args, kwargs).items()
                if isinstance(value, torch.Tensor)
            }

        return hook

    def _left(self, name: str, may_start: bool) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._inside.pop()
            starts = may_start and name not in self._consumers
            for tensor in tensor_leaves(output):
                self._set(tensor, frozenset([name]) if starts else frozenset())

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._inside:
            return output
        inputs = tensor_leaves((args, kwargs))
        found = self._of(inputs)
        origins = frozenset().union(*(self._origins.get(storage_key(t), frozenset()) for t in inputs))
        if origins:
            for tensor in tensor_leaves(output):
                self._kept.append(tensor)
                key = storage_key(tensor)
                self._origins[key] = self._origins.get(key, frozenset()) | origins
        if found:
            for index in origins:
                self._met_inputs[index] = self._met_inputs.get(index, frozenset()) | found
            for tensor in inputs:
                name = self._parameters.get(storage_key(tensor))
                if name is not None:
                    self._met[name] = self._met.get(name, frozenset()) | found
            for tensor in tensor_leaves(output):
                self._set(tensor, self._of([tensor]) | found)
        return output

    def _of(self, tensors: list[torch.Tensor]) -> frozenset[str]:
        return frozenset().union(*(self._labels.get(storage_key(tensor), frozenset()) for tensor in tensors))

    def _set(self, tensor: torch.Tensor, labels: frozenset[str]) -> None:
        self._kept.append(tensor)
        self._labels[storage_key(tensor)] = labels

    def shared_inputs(self) -> list[tuple[str, ...]]:
        """Layers that read the same tensor, once each."""
        groups = [tuple(dict.fromkeys(names)) for names in self._readers.values()]
        return [group for group in groups if len(group) > 1]

    def regions(self) -> list[Region]:
        """Rows that share a column belong together; an ``nn.MultiheadAttention`` is a region by itself."""
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
            Region((name,), (f"{name}.out_proj" if name else "out_proj",), (), ())
            for name in self._attentions
            if name in self.called
        ]
        return attentions + [
            Region(
                tuple(sorted(columns)),
                tuple(rows),
                tuple(name for name, met in self._met.items() if met & columns),
                tuple(index for index, met in self._met_inputs.items() if met & columns),
            )
            for columns, rows in merged
        ]


@contextmanager
def _reads(block: nn.Module) -> Iterator[dict[str, dict[str, int]]]:
    """Collects the whole numbers that modules of `block` read from themselves and from their config."""
    found: dict[str, dict[str, int]] = {}
    for name, module in block.named_modules():
        numbers: dict[str, int] = {}
        found[name] = numbers
        _watch(module, numbers, "")
        config = vars(module).get("config")
        if config is not None:
            module.config = _watched_copy(config, numbers)
    yield found


def _watch(owner: Any, numbers: dict[str, int], prefix: str) -> None:
    base: Any = type(owner)

    def read(self: Any, name: str) -> Any:
        value = base.__getattribute__(self, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and (prefix or name in vars(owner)):
            numbers[prefix + name] = value
        return value

    owner.__class__ = type(base.__name__, (base,), {"__getattribute__": read})


def _watched_copy(config: Any, numbers: dict[str, int]) -> Any:
    fake_copy = copy.copy(config)
    _watch(fake_copy, numbers, "config.")
    return fake_copy
