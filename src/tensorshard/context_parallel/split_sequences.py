"""Cuts the inputs of a model along the sequence, wherever the model is called."""

import inspect
import logging
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from tensorshard.context_parallel import ContextGroup, cut, from_local, whole
from tensorshard.context_parallel.layout_changes import gathered, part_of
from tensorshard.context_parallel.layouts import SequenceLayout, contiguous, expanded, zigzag
from tensorshard.context_parallel.sequence_tensor import SequenceTensor
from tensorshard.model.batches import call_arguments
from tensorshard.model.forward_contexts import RootRole, hook_root, surround_root
from tensorshard.model.tensors import TensorSpec
from tensorshard.model.whole_sequences import (
    Crossing,
    Output,
    PositionOrder,
    WholeSequences,
    first_sequence,
    sequence_dim,
)
from tensorshard.torch_private.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# Batches of which each rank is given its own positions alone: samples are cut before they are put together.

Place = tuple[int, int]
"""The dimension of a batch's tensor that was cut, and how long it was."""


def layout_of(length: int, size: int, order: str) -> SequenceLayout:
    """Which rank holds which positions of a sequence.

    Args:
        order: of the positions; "zigzag" where the sequence is long enough for it.
    """
    return (zigzag if order == "zigzag" and length >= 4 * size else contiguous)(length, size)


@dataclass(frozen=True)
class CutSamples:
    """Puts samples together as ``default_collate`` does, each without the positions of other ranks.

    An array or tensor of a sample that is read lazily, such as a memory-mapped one, is read only where this rank has
    positions.

    Args:
        rank, size: this rank, and how many share sequences.
        order: of the positions.
    """

    rank: int
    size: int
    order: str

    def __call__(self, samples: Sequence[Any]) -> tuple[Any, list[Place | None]]:
        """The batch of this rank's positions, and for each of its tensors where it was cut.

        Raises:
            ValueError: samples have sequences of different lengths, or none.
        """
        cut, places = zip(*map(self._cut, samples), strict=True)
        if any(each != places[0] for each in places):
            lengths = sorted({place[1] for each in places for place in each if place is not None})
            raise ValueError(
                f"cut_sequences=True was given, and a batch has sequences of {' and '.join(map(str, lengths))} "
                f"positions, of which no equal parts can be put together; let the dataset pad or cut them to one length"
            )
        return default_collate(list(cut)), list(places[0])

    def _cut(self, sample: Any) -> tuple[Any, list[Place | None]]:
        leaves, structure = tree_flatten(sample)
        shapes = [torch.empty(1, *leaf.shape, dtype=_dtype(leaf), device="meta") if _is_array(leaf) else leaf
                  for leaf in leaves]  # fmt: skip
        first = first_sequence({"": shapes})
        places: list[Place | None] = []
        for number, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
            dim = None if first is None else sequence_dim(shape, *first, shortest=2 * self.size)
            if dim is None or shape.shape[dim] < 2 * self.size:
                places.append(None)
                continue
            places.append((dim, shape.shape[dim]))
            runs = layout_of(shape.shape[dim], self.size, self.order).runs[self.rank]
            parts = [leaf[(slice(None),) * (dim - 1) + (slice(int(start), int(stop)),)] for start, stop in runs]
            leaves[number] = torch.cat([torch.as_tensor(np.array(part)) if isinstance(part, np.ndarray) else part
                                        for part in parts], dim - 1)  # fmt: skip
        if not any(places):
            raise ValueError(
                f"cut_sequences=True was given, but no tensor of a sample has a sequence of at least {2 * self.size} "
                f"positions; give tensors or arrays, such as token ids of shape [positions], or leave cut_sequences out"
            )
        return tree_unflatten(leaves, structure), places


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray)


def _dtype(leaf: Any) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, torch.Tensor) else torch.as_tensor(np.empty(0, leaf.dtype)).dtype


logger = logging.getLogger("tensorshard")

_SHOWN = 5
_NEIGHBOURS = ("halo", "recurrent", "recurrent state")
"""Exchanges that send less where a rank has one run of positions."""


class SplitSequences(WholeSequences):
    """Each rank of context parallelism gets its positions of every sequence among the model's inputs.

    Values that code computes from them are those of whole sequences, whatever dimension is cut. Which one it is decides
    how much is sent.

    Args:
        model: the root of what this rank computes.
        group: the ranks that share sequences.
        dims: as :class:`tensorshard.Plan` takes ``cp_dims``.
        order: of positions.
        keeps_keys: whether keys and values of all ranks are kept for backward, and not fetched again.
        listed: operations on whole sequences, as in :attr:`gathered_operations`, that were logged already; None to log
            none.
    """

    are_split = True

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        dims: Mapping[str, int] | None,
        *,
        order: PositionOrder,
        keeps_keys: bool,
        listed: Container[tuple[str, str]] | None = (),
    ) -> None:
        self.group = ContextGroup.of(group)
        self.group.refetches = not keeps_keys
        self.order: PositionOrder = order
        order.sources.append(self._notes)
        self._dims = dims
        self._parameters = [
            name
            for name, parameter in inspect.signature(type(model).forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ][1:]
        self._listed = listed
        self._is_told = listed is None
        hook_root(model, RootRole.SPLIT_SEQUENCES, before=self._cut, with_kwargs=True)
        surround_root(model, RootRole.SPLIT_SEQUENCES, self.active)  # around the hook

    @property
    def gathered_operations(self) -> Mapping[tuple[str, str], int]:
        return self.group.fallbacks

    def active(self) -> AbstractContextManager[object]:
        """Within this, the model and the loss compute with parts of sequences."""
        return self.group.active()

    def whole(self, tree: Any) -> Any:
        """`tree` with whole tensors. A collective of the ranks, if any of them is split."""
        result = whole(tree)
        self._say_what_was_gathered()
        return result

    def _notes(self) -> tuple[int, int]:
        """How often causal attention was computed, and how often neighbouring positions were exchanged."""
        return self.group.causal_calls, sum(self.group.calls[what] for what in _NEIGHBOURS)

    def _say_what_was_gathered(self) -> None:
        """After the first loss: which operations were computed on whole sequences, since no rule knows them."""
        if self._is_told:
            return
        self._is_told = True
        assert self._listed is not None
        gathered = Counter({key: times for key, times in self.group.fallbacks.items() if key not in self._listed})
        for (operation, line), times in gathered.most_common(_SHOWN if dist.get_rank() == 0 else 0):
            logger.warning(
                "context parallelism: %s (%s) was computed on whole sequences, by every rank, %d times in the first "
                "forward, which is exact, and takes time and memory",
                operation,
                line,
                times,
            )

    def _cut(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.order.decide_after_first_run()
        self.order.has_run = True
        named = self._named(args, kwargs)
        if self._dims is None:
            first = first_sequence(named)
            given = {name: tree_map(lambda leaf: self._cut_leaf(leaf, first), value) for name, value in named.items()}
        else:
            unknown = sorted(self._dims.keys() - named.keys())
            if unknown:
                raise ValueError(
                    f"cp_dims names {', '.join(map(repr, unknown))}, but the model was called with "
                    f"{', '.join(map(repr, named))}"
                )
            given = {name: self._cut_named(name, value) for name, value in named.items()}
        positional = [given[name] for name in self._names(len(args))]
        return tuple(positional), {name: given[name] for name in kwargs}

    def crossing(self, inputs: Any) -> Crossing:
        named = self._named(*call_arguments(inputs))
        if self._dims is None:
            first = first_sequence(named)
            leaves = [(leaf, self._dim(leaf, first)) for value in named.values() for leaf in tree_leaves(value)]
            lengths = [leaf.shape[dim] for leaf, dim in leaves if dim is not None]
        else:
            lengths = [named[name].shape[dim] for name, dim in self._dims.items() if name in named]
        return _CrossingParts(self.group, [self._layout(length) for length in dict.fromkeys(lengths)])

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._names(len(args)), args, strict=True)), **kwargs}

    def _names(self, count: int) -> list[str]:
        """What positional arguments are called."""
        names = self._parameters[:count]
        return [*names, *(f"input {index}" for index in range(len(names), count))]

    def _cut_leaf(self, leaf: Any, first: tuple[torch.Tensor, int] | None) -> Any:
        dim = self._dim(leaf, first)
        return leaf if dim is None else self._cut_along(leaf, dim)

    def _dim(self, leaf: Any, first: tuple[torch.Tensor, int] | None) -> int | None:
        return None if first is None else sequence_dim(leaf, *first, shortest=2 * self.group.size)

    def _cut_named(self, name: str, value: Any) -> Any:
        assert self._dims is not None
        if name not in self._dims:
            return value
        dim = self._dims[name]
        if not isinstance(value, torch.Tensor) or not -value.dim() <= dim < value.dim():
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"cp_dims says that dimension {dim} of {name!r} is its sequence, but it is {given}")
        return self._cut_along(value, dim % value.dim())

    def _cut_along(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        layout = self._layout(tensor.shape[dim])
        if isinstance(tensor, SequenceTensor):  # of a loader that cuts sequences
            return from_local(part_of(tensor, dim, layout, "input", self.group), dim, layout)
        return cut(tensor, dim, layout)

    def _layout(self, length: int) -> SequenceLayout:
        return layout_of(length, self.group.size, self.order.name)

    def cutter(self) -> CutSamples:
        return CutSamples(self.group.rank, self.group.size, self.order.name)

    def joined(self, part: torch.Tensor, place: tuple[int, int], cutter: CutSamples) -> torch.Tensor:
        dim, length = place
        return SequenceTensor(part, dim, layout_of(length, self.group.size, cutter.order), self.group)


class _CrossingParts(Crossing):
    """A rank hands over its positions. Where a stage has a tensor in another layout, it is brought into this one.

    Args:
        layouts: of the sequences that were cut.
    """

    def __init__(self, group: ContextGroup, layouts: Sequence[SequenceLayout]) -> None:
        self._group = group
        self._layouts = {layout.length: layout for layout in layouts}

    def spec(self, spec: TensorSpec, output: Output) -> TensorSpec:
        where = self._where(spec.shape)
        return spec if where is None else spec.with_length(where[0], where[1].sizes[self._group.rank])

    def part(self, tensor: torch.Tensor, spec: TensorSpec, output: Output) -> torch.Tensor:
        where = self._where(spec.shape)
        return gathered(tensor, "stage") if where is None else part_of(tensor, *where, "stage", self._group)

    def joined(self, part: torch.Tensor, spec: TensorSpec, output: Output) -> torch.Tensor:
        where = self._where(spec.shape)
        return part if where is None else SequenceTensor(part, *where, self._group)

    def _where(self, shape: Sequence[int]) -> tuple[int, SequenceLayout] | None:
        """The dimension that is split, and how: that of a sequence, else one that is probably made from it. None for a
        tensor that is too small to be split."""
        for dim in (*range(1, len(shape)), 0):
            if dim < len(shape) and shape[dim] in self._layouts:
                return dim, self._layouts[shape[dim]]
        for length, layout in self._layouts.items():
            if shape and shape[0] and shape[0] % length == 0:  # samples and positions as one dimension
                return 0, expanded(layout, shape[0] // length, 1)
        dim = min(len(shape) - 1, 1 if len(shape) < 4 else 2)
        if dim < 0 or shape[dim] < 2 * self._group.size:
            return None
        return dim, contiguous(shape[dim], self._group.size)
