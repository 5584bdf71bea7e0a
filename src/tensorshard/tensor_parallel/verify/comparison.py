"""Compares what the ranks of a split block computed with what the full block computed.

With a right table they agree up to rounding. With a wrong one, they differ by as much as the values themselves.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tensorshard.model.model_errors import raised_in_operation
from tensorshard.tensor_parallel.table.layouts import REPLICATED, Layout, join_shards

TOLERANCE = 1e-3
"""Largest difference that passes, as a share of the largest value. It is well above fp32's rounding errors, and well
below the effect of a mistake."""

# Some gradients are zero but for rounding (an attention's key bias). Their differences are measured against this share
# of the largest gradient.
_LEAST_SCALE = 1e-2

# What torch's operations say about sizes alone, whatever the tensors' strides.
_SIZES = re.compile("size of tensor .* must match|cannot be multiplied|is invalid for input of size")


class MismatchError(ValueError):
    """A split block does not compute what the full one does, or cannot run.

    Args:
        message: what was seen.
        amount: by how much numbers differ, as a share of the largest.
        in_operation: whether an operation could not run on the shapes that it was given.
        operations: how many operations of the forward the first rank ran.
    """

    def __init__(self, message: str, amount: float = 0.0, in_operation: bool = False, operations: int = 0) -> None:
        super().__init__(message)
        self.amount, self.in_operation, self.operations = amount, in_operation, operations

    def again(self, operations: int = 0) -> "MismatchError":
        """The same error after `operations` more, without the frames of the run, which hold its tensors."""
        return MismatchError(str(self), self.amount, self.in_operation, operations + self.operations)

    @property
    def of_sizes(self) -> bool:
        """Whether an operation said that the sizes of its tensors do not suit each other."""
        return _SIZES.search(str(self)) is not None


def not_running(error: Exception) -> MismatchError:
    """The error for a split block that does not run but raises `error`."""
    message = f"it does not run: {type(error).__name__}: {_first_line(error)}"
    return MismatchError(message, in_operation=raised_in_operation(error))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


@dataclass
class Agreement:
    """What a successful check found.

    Args:
        sharded_outputs: tensor leaves of the block's output of which this rank has only its shard, each with its
            dimension.
    """

    sharded_outputs: dict[int, int] = field(default_factory=dict)


@dataclass
class BlockRun:
    """What one run of a block computed.

    Args:
        outputs: the tensor leaves of its output.
        input_gradients: of the tensors among its inputs; None for those that have none.
        gradients: of its parameters, by name.
    """

    outputs: list[torch.Tensor]
    input_gradients: list[torch.Tensor | None]
    gradients: dict[str, torch.Tensor]

    @property
    def is_a_number(self) -> bool:
        """Whether nothing in it is NaN, as after an overflow or the root of a negative number."""
        gradients = [gradient for gradient in self.input_gradients if gradient is not None]
        results = [*self.outputs, *gradients, *self.gradients.values()]
        return not any(torch.isnan(tensor).any() for tensor in results if tensor.is_floating_point())


def compare_full_outputs(outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Compares those of one rank's `outputs` that are full with `expected`.

    Raises:
        MismatchError: they differ.
    """
    for index, (output, full) in enumerate(zip(outputs, expected, strict=True)):
        if output.shape == full.shape:
            _compare(_output(index, expected), output.detach(), full)


def compare_outputs(runs: Sequence[BlockRun], expected: BlockRun) -> Agreement:
    """Compares the outputs of all ranks, in order, with those of the full block.

    Raises:
        MismatchError: they differ.
    """
    agreement = Agreement()
    for index, full in enumerate(expected.outputs):
        outputs = [run.outputs[index] for run in runs]
        what = _output(index, expected.outputs)
        dim = differing_dim(outputs[0].shape, full.shape)
        if dim is None:
            for value in outputs:
                _compare(what, value, full)
        else:
            agreement.sharded_outputs[index] = dim
            _compare(what, join_shards(outputs, Layout(dim, (full.shape[dim],))), full)
    return agreement


def compare_gradients(
    runs: Sequence[BlockRun], expected: BlockRun, layouts: Mapping[str, Layout], sliced: Mapping[int, Layout]
) -> None:
    """Compares the gradients of all ranks, in order, with those of the full block.

    Args:
        layouts: of its parameters, by name.
        sliced: of those inputs of which each rank has only its shard, by index.

    Raises:
        MismatchError: they differ.
    """
    gradients = [*expected.gradients.values(), *(g for g in expected.input_gradients if g is not None)]
    least = _LEAST_SCALE * max((g.abs().max().item() for g in gradients if g.numel()), default=0.0)
    for index, gradient in enumerate(expected.input_gradients):
        if gradient is None:
            continue
        gradients_of_ranks = [run.input_gradients[index] for run in runs]
        if index in sliced:
            gradients_of_ranks = [
                join_shards([_present(f, "an input's gradient") for f in gradients_of_ranks], sliced[index])
            ]
        for value in gradients_of_ranks:
            _compare("the gradient of its input", _present(value, "the gradient of its input"), gradient, least)
    for name, gradient in expected.gradients.items():
        what = f"the gradient of {name}"
        shards = [_present(run.gradients.get(name), what) for run in runs]
        for value in shards if layouts[name].dim is None else [join_shards(shards, layouts[name])]:
            _compare(what, value, gradient, least)


def compare_written(
    ranks: Sequence[Mapping[str, torch.Tensor]], expected: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout]
) -> None:
    """Compares what the forwards of all ranks, in order, have written to parameters and buffers.

    Args:
        expected: what the full block's forward wrote, by name.
        layouts: of the parameters and buffers; those that are not there are whole on every rank.

    Raises:
        MismatchError: they differ.
    """
    for name, full in expected.items():
        written = [rank[name] for rank in ranks if name in rank]
        layout = layouts.get(name, REPLICATED)
        for value in written if layout.dim is None else [join_shards(written, layout)]:
            _compare(f"what its forward writes to {name}", value, full)


def differing_dim(shape: torch.Size, expected: torch.Size) -> int | None:
    """The one dimension in which a rank's shard is smaller than the full tensor; None if the shapes are equal.

    Raises:
        MismatchError: the shapes differ in another way.
    """
    if shape == expected:
        return None
    dims = [dim for dim, (f, e) in enumerate(zip(shape, expected, strict=False)) if f != e]
    if len(shape) != len(expected) or len(dims) != 1 or shape[dims[0]] > expected[dims[0]]:
        raise MismatchError(f"an output has the shape {list(shape)} where {list(expected)} is expected")
    return dims[0]


def _output(index: int, outputs: Sequence[torch.Tensor]) -> str:
    return f"its output {index}" if len(outputs) > 1 else "its output"


def _present(gradient: torch.Tensor | None, what: str) -> torch.Tensor:
    if gradient is None:
        raise MismatchError(f"{what} is missing on a rank")
    return gradient


def _compare(what: str, value: torch.Tensor, expected: torch.Tensor, least_scale: float = 1e-6) -> None:
    if value.shape != expected.shape:
        raise MismatchError(f"{what} has the shape {list(value.shape)} where {list(expected.shape)} is expected")
    if expected.numel() == 0:
        return
    if not expected.is_floating_point():
        if not torch.equal(value, expected):
            raise MismatchError(f"{what} differs")
        return
    odd = ~expected.isfinite()
    if odd.any():  # rows in which all is masked, say: they are odd on one device, too
        if odd.all():
            raise MismatchError(f"{what} has no finite value on random weights and inputs, so nothing can be compared")
        if not torch.equal(value[odd].nan_to_num(), expected[odd].nan_to_num()):
            raise MismatchError(f"{what} is infinite or NaN at other places")
        value, expected = value[~odd], expected[~odd]
    scale = expected.abs().max().clamp(min=max(least_scale, 1e-30))  # all may be exactly zero
    error = ((value - expected).abs().max() / scale).item()
    if not error <= TOLERANCE:
        raise MismatchError(f"{what} differs by {error:.0%} of its largest value", error)
