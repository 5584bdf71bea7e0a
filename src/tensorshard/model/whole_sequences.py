"""Where a model without context parallelism has its sequences: whole, on every rank.

Also here: which dimension of an input is its sequence.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tensorshard.model.tensors import TensorSpec
from tensorshard.torch_private.pytree import tree_leaves

logger = logging.getLogger("tensorshard")


Output = tuple[str, int]
"""A module of a model, and the index of a tensor among those that it returns."""


class Crossing:
    """What a rank hands to the next stage of a pipeline, where sequences are whole: all of each tensor.

    The methods are given the `spec` that a tensor of the model has on one device, and the `output` that it is.
    """

    def spec(self, spec: TensorSpec, output: Output) -> TensorSpec:
        """Of what is sent for a tensor."""
        return spec

    def held(self, spec: TensorSpec, output: Output) -> TensorSpec:
        """Of a tensor as the model's code has it on a rank."""
        return spec

    def part(self, tensor: torch.Tensor, spec: TensorSpec, output: Output) -> torch.Tensor:
        """What is sent for `tensor`."""
        return tensor

    def joined(self, part: torch.Tensor, spec: TensorSpec, output: Output) -> torch.Tensor:
        """The model's tensor of which this rank was sent `part`."""
        return part


def is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor looks whole, and holds this rank's positions."""
    return hasattr(type(tensor), "handlers") and hasattr(tensor, "split_dim")


class PositionOrder:
    """In which order the ranks of context parallelism hold positions; the stages that a rank has share it.

    In zig-zag order each rank has as much of causal attention to compute as any other. Where neighbouring positions are
    exchanged, one run of positions is better.

    Args:
        name: "zigzag", "contiguous", or "auto" to decide it after a first run.
        in_stages: whether the stages of a pipeline decide it together, by :meth:`choose`.

    Attributes:
        sources: of each part of a model, how often it has computed causal attention, and exchanged neighbours.
        has_run: whether a part has run.
    """

    def __init__(self, name: str = "auto", *, in_stages: bool = False) -> None:
        self.name = name
        self._in_stages = in_stages
        self.sources: list[Callable[[], tuple[int, int]]] = []
        self.has_run = False

    @property
    def is_open(self) -> bool:
        """Whether it is to be decided."""
        return self.name == "auto"

    def notes(self) -> list[int]:
        """What speaks for zig-zag order, and what speaks against it; the same on all ranks that share sequences."""
        return [sum(column) for column in zip(*(source() for source in self.sources), strict=True)]

    def decide_after_first_run(self) -> None:
        """Decides it if a first run is over."""
        if self.is_open and self.has_run and not self._in_stages:
            self.choose(self.notes())

    def choose(self, notes: Sequence[float]) -> None:
        """Decides by :meth:`notes`."""
        self.name = "zigzag" if notes[0] and not notes[1] else "contiguous"
        logger.info("context parallelism: ranks hold positions in %s order from now on", self.name)

    def state_dict(self) -> dict[str, Any]:
        """The order, with which a run that goes on computes the same to the last bit."""
        self.decide_after_first_run()
        return {"name": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over an order, unless this one is decided."""
        if self.is_open:
            self.name = str(state["name"])


class WholeSequences:
    """How sequences are split over ranks between the modules of a model; this one is for none, and does nothing.

    Attributes:
        are_split: whether ranks have parts of sequences.
        order: of the positions that ranks hold; None where they hold all.
    """

    are_split = False
    order: PositionOrder | None = None

    @property
    def gathered_operations(self) -> Mapping[tuple[str, str], int]:
        """(operation, line of the user's code) -> how often it was computed on whole sequences: no rule knows it."""
        return {}

    def active(self) -> AbstractContextManager[object]:
        """Within this, the model and the loss compute with parts of sequences."""
        return nullcontext()

    def whole(self, tree: Any) -> Any:
        """`tree` with whole tensors. A collective of the ranks, if any of them is split."""
        return tree

    def cutter(self) -> Any:
        """What puts samples together without the positions of other ranks, and returns where tensors were cut; None
        where sequences are whole."""
        return None

    def joined(self, part: torch.Tensor, place: tuple[int, int], cutter: Any) -> torch.Tensor:
        """The tensor of which `cutter` gave this rank a part: `place` is its dimension, and how long that was."""
        return part

    def crossing(self, inputs: Any) -> Crossing:
        """How tensors of a micro-batch go from stage to stage of a pipeline.

        Args:
            inputs: the model's, as for ``Engine.step``.
        """
        return Crossing()


def first_sequence(named: Mapping[str, Any]) -> tuple[torch.Tensor, int] | None:
    """The first input with samples and positions, and the dimension of its sequence.

    Token ids and embeddings have it in their second dimension. An image has it in its third one, its rows.
    """
    for value in named.values():
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2:
                dim = 1 if leaf.dim() < 4 else 2
                if leaf.shape[dim] > 1:
                    return leaf, dim
    return None


def sequence_dim(leaf: Any, first: torch.Tensor, dim: int, *, shortest: int) -> int | None:
    """Which dimension of an input is a sequence, if any.

    It is the first dimension after the samples that is as long as the sequence of `first`. What looks as `first` does,
    or holds token ids, may be another sequence, such as a decoder's.

    Args:
        first: the first input that has a sequence, in its dimension `dim`.
        shortest: another sequence has this length at least.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
        return None
    for candidate in range(1, leaf.dim()):
        if leaf.shape[candidate] == first.shape[dim]:
            return candidate
    if (leaf.dim(), leaf.dtype) == (first.dim(), first.dtype):
        other = dim
    elif leaf.dim() == 2 and leaf.dtype in (torch.int64, torch.int32):
        other = 1
    else:
        return None
    return other if leaf.shape[other] >= shortest else None
