"""Where a model without context parallelism has its sequences: whole, on every rank."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tensorshard.model.tensors import TensorSpec


class Crossing:
    """What a rank hands to the next stage of a pipeline, where sequences are whole: all of each tensor."""

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """Of what is sent for a tensor of the model that has this `spec`."""
        return spec

    def part(self, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """What is sent for `tensor`."""
        return tensor

    def joined(self, part: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """The model's tensor of which this rank was sent `part`."""
        return part


class WholeSequences:
    """How sequences are split over the ranks of context parallelism; this one is for none, and does nothing.

    Attributes:
        are_split: whether ranks have parts of sequences.
    """

    are_split = False

    def active(self) -> AbstractContextManager[object]:
        """Within this, the model and the loss compute with parts of sequences."""
        return nullcontext()

    def whole(self, tree: Any) -> Any:
        """`tree` with whole tensors. A collective of the ranks, if any of them is split."""
        return tree

    def crossing(self, inputs: Any) -> Crossing:
        """How tensors of a micro-batch go from stage to stage of a pipeline.

        Args:
            inputs: the model's, as for ``Engine.step``.
        """
        return Crossing()
