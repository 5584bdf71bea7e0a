"""Where a model without context parallelism has its sequences: whole, on every rank."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any


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
