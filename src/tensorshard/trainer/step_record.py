"""The record of one training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tensorshard.model.batches import batch_size
from tensorshard.torch_private import pytree


@dataclass(frozen=True)
class BatchSize:
    """The size of a batch in samples, and in tokens if samples are sequences of token ids."""

    samples: int
    tokens: int | None

    @classmethod
    def of(cls, inputs: Any) -> "BatchSize":
        """The size of `inputs`: a tensor, or a tuple or dict of them, whose first dimension is the batch.

        Tokens are counted if the first tensor holds integers and has two dimensions, [batch, sequence].

        Raises:
            TypeError, ValueError: `inputs` do not show how many samples they hold.
        """
        samples = batch_size(inputs)
        first = next(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0)
        is_text = first.dim() == 2 and not first.is_floating_point()
        return cls(samples, first.numel() if is_text else None)

    def times(self, count: int) -> "BatchSize":
        """The size of `count` batches like this one."""
        return BatchSize(self.samples * count, None if self.tokens is None else self.tokens * count)


@dataclass
class StepRecord:
    """One optimizer step, as hooks see it; they add what they measure to `metrics`.

    Attributes:
        step: optimizer steps done, this one included.
        loss: global mean loss, a tensor on the engine's device: reading it waits for the device.
        batch: size of the global batch.
        metrics: measurements by name, to be logged beside the loss.
        returned: what the loss function returned by name beside it, as ``Engine.metrics``: scalars on the device.
    """

    step: int
    loss: Tensor
    batch: BatchSize
    metrics: dict[str, float] = field(default_factory=dict)
    returned: Mapping[str, Tensor] = field(default_factory=dict)
