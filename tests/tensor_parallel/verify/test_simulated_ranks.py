"""Simulated ranks: the others start when the first needs them."""

import pytest
import torch

from tensorshard.tensor_parallel.verify.simulated_ranks import run_as_ranks


def test_a_first_rank_that_fails_alone_starts_no_others():
    started = []

    def fail(group):
        started.append(group.rank())
        raise ValueError("shapes")

    with pytest.raises(ValueError, match="shapes"):
        run_as_ranks(3, fail)
    assert started == [0]


def test_others_start_when_the_first_waits_or_has_returned():
    def total(group):
        value = torch.full((2,), group.rank() + 1.0)
        group.allreduce([value])
        return value.tolist()

    assert run_as_ranks(3, total) == [[6.0, 6.0]] * 3
    assert run_as_ranks(3, lambda group: group.rank()) == [0, 1, 2]
