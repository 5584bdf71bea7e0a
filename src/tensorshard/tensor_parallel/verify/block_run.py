"""Runs of a block, full or split, forward and backward; and the comparison of such runs in training.

Blocks are compared in evaluation (:mod:`.block_check`). In training their code may do something else, under
``if self.training``, and may need the whole of what a split layer returns: statistics of it, say.
"""

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tensorshard.model.fake_copies import mixed_mask
from tensorshard.model.model_errors import failed_line, raised_by_model
from tensorshard.model.provenance import SOFTMAXES, STATISTICS, NotedStatistics
from tensorshard.model.reachable_state import draws_on_host
from tensorshard.model.state_places import host_random_restored, host_random_states
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.tensor_parallel.table.layouts import Layout, local_shard
from tensorshard.tensor_parallel.verify.block_calls import WithoutRandomness
from tensorshard.tensor_parallel.verify.comparison import (
    BlockRun,
    MismatchError,
    compare_full_outputs,
    compare_gradients,
    compare_outputs,
    compare_written,
    differing_dim,
    not_running,
)
from tensorshard.tensor_parallel.verify.simulated_ranks import run_as_ranks

# In training, parameters and buffers of more elements are not compared.
_LARGEST = 1 << 18


class Statistics(NotedStatistics):
    """Notes of which shapes a forward takes statistics, and over which dimensions.

    Attributes:
        attends_to_one: whether its attention has a single key, which gets all weight whatever the queries are.
    """

    def __init__(self) -> None:
        super().__init__({**STATISTICS, **SOFTMAXES})
        self.attends_to_one = False
        self._noted: dict[tuple[Any, torch.Size, tuple[int, ...]], None] = {}

    def note(self, function: Callable[..., Any], tensor: torch.Tensor, dims: tuple[int, ...] | None) -> None:
        if function in SOFTMAXES:
            self.attends_to_one |= tensor.dim() > 3 and dims is not None and tensor.shape[dims[0]] == 1
        elif tensor.is_floating_point() and torch.is_grad_enabled():
            self._noted[function, tensor.shape, tuple(range(tensor.dim())) if dims is None else dims] = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            key = args[1] if len(args) > 1 else (kwargs or {}).get("key")
            self.attends_to_one |= isinstance(key, torch.Tensor) and key.shape[-2] == 1
        return super().__torch_function__(func, types, args, kwargs)

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


class TrainingCheck:
    """What a full block computes in training, dropout left out.

    Args:
        make_copy: makes a copy of the block, in training, to change and run.
        given: its arguments.
        generator: of the cotangents.
        written: names of the parameters and buffers that a forward writes, which are compared whatever their size.
    """

    def __init__(
        self, make_copy: Callable[[], nn.Module], given: Any, generator: torch.Generator, written: Container[str] = ()
    ) -> None:
        self._make_copy, self._writes = make_copy, written
        self._expected: Expected | None = None
        self._failed_line: tuple[str, int] | None = None
        self._written: dict[str, torch.Tensor] = {}
        try:
            self._expected = self._full_run(given, generator)
        except Exception as error:  # a model may need other inputs in training
            if not raised_by_model(error):
                raise
            self._failed_line = failed_line(error)

    def check(
        self,
        size: int,
        split: Callable[[nn.Module, dist.ProcessGroup], Any],
        layouts: Mapping[str, Layout],
        sliced: Mapping[int, Layout],
    ) -> None:
        """Compares results, and what forwards write. A block that makes random numbers only has to run: each rank may
        others. If the full block does not run in training, nothing is compared, but the
        split one may fail nowhere else.

        Args:
            split: makes a full copy of the block a rank's part of it, and returns the arguments of that rank.
            layouts: of the parameters and the buffers that are split.
            sliced: of those inputs of which each rank has only its shard, by index.

        Raises:
            MismatchError: they differ, or the split block does not run.
        """
        expected = self._expected

        def run(group: dist.ProcessGroup) -> tuple[BlockRun, dict[str, torch.Tensor]]:
            copied = self._make_copy()
            given = split(copied, group)
            with WithoutRandomness():
                if expected is None:
                    tensors, outputs = _forward(copied, given)
                    return _results(copied, tensors, outputs), {}
                result = run_split(copied, given, group, expected)
            return result, self._held(copied)

        try:
            with torch.random.fork_rng(devices=[]), host_random_restored():
                ranks = run_as_ranks(size, run)
            if expected is not None and self.compares:
                runs = [result for result, _ in ranks]
                compare_outputs(runs, expected.run)
                compare_gradients(runs, expected.run, layouts, sliced)
                compare_written([held for _, held in ranks], self._written, layouts)
        except Exception as error:
            if not raised_by_model(error):
                raise
            if expected is None and failed_line(error) == self._failed_line:
                return
            refused = error if isinstance(error, MismatchError) else not_running(error)
            raise MismatchError(f"in training, {refused}", refused.amount, refused.in_operation) from error

    def _full_run(self, given: Any, generator: torch.Generator) -> Expected:
        copied = self._make_copy()
        before = {name: value.clone() for name, value in self._held(copied).items()}
        with torch.random.fork_rng(devices=[]), host_random_restored(), WithoutRandomness():
            states = torch.get_rng_state(), host_random_states()
            expected = run_full(copied, given, generator)
            drew = not torch.equal(states[0], torch.get_rng_state())
            drew = drew or (states[1] != host_random_states() and draws_on_host(copied))
        after = self._held(copied)
        self._written = {
            name: after[name]
            for name, value in before.items()
            if name in after and not (after[name].shape == value.shape and torch.equal(after[name], value))
        }
        return replace(expected, drew=drew or not expected.run.is_a_number)

    @property
    def compares(self) -> bool:
        """Whether numbers are compared."""
        return self._expected is not None and not self._expected.drew

    def _held(self, block: nn.Module) -> dict[str, torch.Tensor]:
        """The parameters and buffers of `block`, by name."""
        named = (*block.named_parameters(), *block.named_buffers())
        return {n: tensor.detach() for n, tensor in named if tensor.numel() <= _LARGEST or n in self._writes}
