"""What is said of the numbers that ranks computed, against those of the full block."""

import pytest
import torch

from tensorshard.tensor_parallel.table.layouts import Layout
from tensorshard.tensor_parallel.verify.comparison import (
    Agreement,
    BlockRun,
    MismatchError,
    compare_full_outputs,
    compare_gradients,
    compare_outputs,
    differing_dim,
)

FULL = torch.arange(1.0, 13).reshape(2, 6)
EXPECTED = BlockRun([FULL, torch.ones(2)], [FULL, None], {"weight": FULL, "bias": torch.ones(6)})
LAYOUTS, SLICED = {"weight": Layout(1, (6,)), "bias": Layout()}, {0: Layout(1, (6,))}


def _ranks() -> list[BlockRun]:
    """Each with its columns of whatever is split."""
    return [
        BlockRun([part, torch.ones(2)], [part, None], {"weight": part, "bias": torch.ones(6)})
        for part in FULL.chunk(2, 1)
    ]


def test_shards_that_are_right_together():
    ranks = _ranks()
    assert compare_outputs(ranks, EXPECTED) == Agreement({0: 1})
    compare_gradients(ranks, EXPECTED, LAYOUTS, SLICED)
    for rank in ranks:
        compare_full_outputs(rank.outputs, EXPECTED.outputs)


def test_outputs_that_differ_are_named_with_the_amount():
    ranks = _ranks()
    ranks[1].outputs[0] = ranks[1].outputs[0] + 3  # a quarter of the largest
    with pytest.raises(MismatchError, match="its output 0 differs by 25% of its largest value") as raised:
        compare_outputs(ranks, EXPECTED)
    assert raised.value.amount == pytest.approx(0.25)
    ranks[0].outputs[1] = torch.zeros(2)
    with pytest.raises(MismatchError, match="its output 1 differs by 100%"):
        compare_full_outputs(ranks[0].outputs, EXPECTED.outputs)


def test_gradients_that_differ_or_are_missing_are_named():
    ranks = _ranks()
    ranks[1].gradients["weight"] = torch.zeros(2, 3)
    with pytest.raises(MismatchError, match="the gradient of weight differs by 100%"):
        compare_gradients(ranks, EXPECTED, LAYOUTS, SLICED)
    del ranks[0].gradients["weight"]
    with pytest.raises(MismatchError, match="the gradient of weight is missing on a rank"):
        compare_gradients(ranks, EXPECTED, LAYOUTS, SLICED)
    ranks[0].input_gradients[0] = None
    with pytest.raises(MismatchError, match="an input's gradient is missing on a rank"):
        compare_gradients(ranks, EXPECTED, LAYOUTS, SLICED)


def test_a_gradient_of_rounding_alone_is_measured_by_the_largest():
    expected = BlockRun([], [], {"weight": FULL, "bias": torch.full((6,), 1e-9)})
    rank = BlockRun([], [], {"weight": FULL, "bias": torch.full((6,), -1e-9)})
    compare_gradients([rank], expected, {"weight": Layout(), "bias": Layout()}, {})


def test_a_shard_is_smaller_along_one_dimension():
    shape = torch.Size([4, 6])
    assert differing_dim(shape, shape) is None and differing_dim(torch.Size([4, 3]), shape) == 1
    for other in ([2, 3], [4, 7], [4]):
        with pytest.raises(MismatchError, match=r"where \[4, 6\] is expected"):
            differing_dim(torch.Size(other), shape)
