"""Context parallelism: tensors that look whole and hold one rank's positions of a sequence, for any model."""

from tensorshard.context_parallel import autograd_functions, dispatch
from tensorshard.context_parallel.context_group import ContextGroup
from tensorshard.context_parallel.layout_changes import cut, from_local, whole
from tensorshard.context_parallel.layouts import SequenceLayout, contiguous, from_positions, zigzag
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

dispatch.install()
autograd_functions.register()

__all__ = [
    "ContextGroup",
    "SequenceLayout",
    "SequenceTensor",
    "contiguous",
    "cut",
    "from_local",
    "from_positions",
    "whole",
    "zigzag",
]
