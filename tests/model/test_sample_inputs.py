"""Small batches in the place of large ones."""

import pytest
import torch

from tensorshard.model.sample_inputs import smaller_inputs
from tensorshard.model.tensors import tensor_leaves

TOKENS = torch.arange(16 * 2048).view(16, 2048)


def shapes(inputs, size=2):
    found = smaller_inputs(inputs, size)
    return None if found is None else [tuple(leaf.shape) for leaf in tensor_leaves(found)]


@pytest.mark.parametrize(
    ("inputs", "size", "expected"),
    [
        (TOKENS, 2, [(2, 12)]),
        (TOKENS, 8, [(2, 16)]),  # which divides by 8, as 2048 does
        (TOKENS, 3, [(2, 2048)]),  # which does not divide by 3
        ({"input_ids": TOKENS, "attention_mask": TOKENS > 0}, 2, [(2, 12)] * 2),
        ((TOKENS, TOKENS[:, :100]), 2, [(2, 2048), (2, 100)]),  # not of one length
        ((TOKENS, torch.zeros(16, 2048, 4)), 2, [(2, 12), (2, 12, 4)]),
        (torch.zeros(16, 3, 32, 32), 2, [(2, 3, 32, 32)]),
        (torch.zeros(16, 5), 2, [(2, 5)]),
        ((TOKENS, torch.zeros(4, 8)), 2, None),  # of other numbers of samples
        (TOKENS[:8, :64], 2, None),  # few
        (torch.zeros(8, 3, 32, 32), 2, None),
        (torch.zeros(()), 2, None),
    ],
)
def test_shapes(inputs, size, expected):
    assert shapes(inputs, size) == expected


def test_the_first_samples_and_positions_are_kept():
    assert torch.equal(smaller_inputs(TOKENS, 2), TOKENS[:2, :12])
