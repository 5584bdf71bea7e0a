"""One run of a block, full or split, forward and backward; what it computed, and what the full block should compute."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.model.fake_copies import mixed_mask
from tensorshard.model.reductions import NotedStatistics
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.tensor_parallel.table.layouts import Layout, local_shard
from tensorshard.tensor_parallel.verify.comparison import BlockRun, MismatchError, compare_full_outputs, differing_dim


class Statistics(NotedStatistics):
    """Notes of which shapes a forward takes statistics, and over which dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[tuple[Any, torch.Size, tuple[int, ...]], None] = {}

    def note(self, function: Callable[..., Any], tensor: torch.Tensor, dims: tuple[int, ...] | None) -> None:
        if tensor.is_floating_point() and torch.is_grad_enabled():
            self._noted[function, tensor.shape, tuple(range(tensor.dim())) if dims is None else dims] = None

    def compare(self, full: "Statistics") -> None:
        """Compares those of a rank with those of the full block.

        A maximum over a rank's heads, say, may be but a scale that is divided out later. On random weights outputs then
        agree, and in training they do not, as where an iteration begins with it.

        Raises:
            MismatchError: one is over a dimension of which the rank has a part.
        """
        for function, shape, dims in self._noted:
            if (function, shape, dims) in full._noted:
                continue
            wholes = [whole for other, whole, same in full._noted if other == function and same == dims]
            if any(_is_part(shape, whole, dims) for whole in wholes):
                raise MismatchError(f"it takes the {function.__name__} over a dimension of which each rank has a part")


def _is_part(shape: torch.Size, whole: torch.Size, dims: tuple[int, ...]) -> bool:
    """Whether `shape` is a part of `whole` along one of `dims`."""
    differing = [dim for dim, (size, full) in enumerate(zip(shape, whole, strict=False)) if size != full]
    return len(shape) == len(whole) and len(differing) == 1 and differing[0] in dims


@dataclass(frozen=True)
class Expected:
    """What the full block computed.

    Args:
        run: its results.
        cotangents: what its outputs were multiplied by before the backward.
        drew: whether it made random numbers, so that no other run has the same values.
        statistics: what its forward takes.
    """

    run: BlockRun
    cotangents: list[torch.Tensor]
    drew: bool = False
    statistics: Statistics = field(default_factory=Statistics)


def run_full(block: nn.Module, given: Any, generator: torch.Generator) -> Expected:
    """Runs a full `block` on copies of `given`; `generator` makes the cotangents."""
    statistics = Statistics()
    with statistics:
        tensors, outputs = _forward(block, given)
    cotangents = [torch.randn(output.shape, generator=generator) for output in outputs]
    _backward(outputs, cotangents)
    return Expected(_results(block, tensors, outputs), cotangents, statistics=statistics)


def run_split(
    block: nn.Module,
    given: Any,
    group: dist.ProcessGroup,
    expected: Expected,
    counter: AbstractContextManager[Any] | None = None,
) -> BlockRun:
    """Runs a rank's part of a block.

    Args:
        counter: entered for the forward.

    Raises:
        MismatchError: it does not compute what is `expected`.
    """
    statistics = Statistics()
    with counter or nullcontext(), statistics:
        tensors, outputs = _forward(block, given)
    statistics.compare(expected.statistics)
    if not expected.drew:
        compare_full_outputs(outputs, expected.run.outputs)  # before backward, which takes longer
    parts = [_shard_like(full, out, group) for full, out in zip(expected.cotangents, outputs, strict=True)]
    _backward(outputs, parts)
    return _results(block, tensors, outputs)


def random_input(leaf: torch.Tensor, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """A value for a tensor among a block's inputs, of which only shape and type are known."""
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, generator=generator).to(dtype)
    if leaf.dtype == torch.bool:
        return mixed_mask(leaf.shape) if leaf.ndim > 1 else torch.ones(leaf.shape, dtype=torch.bool)
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.is_meta else leaf.cpu()


def _forward(block: nn.Module, given: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors among the arguments, and those among the results."""
    given = map_tensors_once(lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad), given)
    # A block may write into its inputs, which autograd does not allow for leaves.
    args, kwargs = map_tensors_once(torch.clone, given)
    return tensor_leaves(given), tensor_leaves(block(*args, **kwargs))


def _backward(outputs: list[torch.Tensor], cotangents: list[torch.Tensor]) -> None:
    total = torch.zeros(())
    for output, cotangent in zip(outputs, cotangents, strict=True):
        if output.requires_grad:
            total = total + (output * cotangent).sum()
    if total.requires_grad:
        total.backward()


def _results(block: nn.Module, tensors: list[torch.Tensor], outputs: list[torch.Tensor]) -> BlockRun:
    return BlockRun(
        [output.detach() for output in outputs],
        [tensor.grad for tensor in tensors],
        {name: p.grad for name, p in block.named_parameters() if p.grad is not None},
    )


def _shard_like(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The part of `full` that matches this rank's `shard` of an output."""
    dim = differing_dim(shard.shape, full.shape)
    return full if dim is None else local_shard(full, Layout(dim, (full.shape[dim],)), group.rank(), group.size())
