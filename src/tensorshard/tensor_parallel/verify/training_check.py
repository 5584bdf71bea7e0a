"""Compares a split block with the full one in training, where its code does something else than in evaluation.

Such code, under ``if self.training``, may need the whole of what a split layer returns: statistics of it, say.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.no_dropout import WithoutDropout
from tensorshard.model.reachable_state import draws_on_host
from tensorshard.model.state_places import host_random_restored, host_random_states
from tensorshard.tensor_parallel.table.layouts import Layout
from tensorshard.tensor_parallel.verify.block_run import Expected, run_full, run_split
from tensorshard.tensor_parallel.verify.comparison import (
    BlockRun,
    MismatchError,
    compare_gradients,
    compare_outputs,
    compare_written,
    not_running,
)
from tensorshard.tensor_parallel.verify.thread_ranks import run_as_ranks

# Parameters and buffers of more elements are not compared.
_LARGEST = 1 << 18


class TrainingCheck:
    """What a full block computes in training, dropout left out.

    Args:
        make_copy: makes a copy of the block, in training, to change and run.
        given: its arguments.
        generator: of the cotangents.
    """

    def __init__(self, make_copy: Callable[[], nn.Module], given: Any, generator: torch.Generator) -> None:
        self._make_copy = make_copy
        self._expected: Expected | None = None
        self._written: dict[str, torch.Tensor] = {}
        try:
            self._expected = self._full_run(given, generator)
        except Exception as error:  # a model may need other inputs in training
            if not raised_by_model(error):
                raise

    def check(
        self,
        size: int,
        split: Callable[[nn.Module, dist.ProcessGroup], Any],
        layouts: Mapping[str, Layout],
        sliced: Mapping[int, Layout],
    ) -> None:
        """Compares results, and what forwards write. A block that makes random numbers only has to run: each rank may
        make others. If the full block does not run in training, nothing is compared.

        Args:
            split: makes a full copy of the block a rank's part of it, and returns the arguments of that rank.
            layouts: of the parameters and the buffers that are split.
            sliced: of those inputs of which each rank has only its shard, by index.

        Raises:
            MismatchError: they differ, or the split block does not run.
        """
        expected = self._expected
        if expected is None:
            return

        def run(group: dist.ProcessGroup) -> tuple[BlockRun, dict[str, torch.Tensor]]:
            copied = self._make_copy()
            given = split(copied, group)
            with WithoutDropout():
                found = run_split(copied, given, group, expected)
            return found, _held(copied)

        try:
            with torch.random.fork_rng(devices=[]), host_random_restored():
                ranks = run_as_ranks(size, run)
            if not expected.drew:
                runs = [found for found, _ in ranks]
                compare_outputs(runs, expected.run)
                compare_gradients(runs, expected.run, layouts, sliced)
                compare_written([held for _, held in ranks], self._written, layouts)
        except Exception as error:
            if not raised_by_model(error):
                raise
            refused = error if isinstance(error, MismatchError) else not_running(error)
            raise MismatchError(f"in training, {refused}", refused.amount, refused.in_operation) from error

    def _full_run(self, given: Any, generator: torch.Generator) -> Expected:
        copied = self._make_copy()
        before = {name: value.clone() for name, value in _held(copied).items()}
        with torch.random.fork_rng(devices=[]), host_random_restored(), WithoutDropout():
            states = torch.get_rng_state(), host_random_states()
            expected = run_full(copied, given, generator)
            drew = not torch.equal(states[0], torch.get_rng_state())
            drew = drew or (states[1] != host_random_states() and draws_on_host(copied))
        after = _held(copied)
        self._written = {
            name: after[name]
            for name, value in before.items()
            if name in after and not (after[name].shape == value.shape and torch.equal(after[name], value))
        }
        return replace(expected, drew=drew or not expected.run.is_a_number)


def _held(block: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of `block`, by name."""
    named = (*block.named_parameters(), *block.named_buffers())
    return {name: tensor.detach() for name, tensor in named if tensor.numel() <= _LARGEST}
