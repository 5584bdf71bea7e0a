"""What counts as a part of a tensor, and which rows of logits are which."""

import pytest
import torch

from tensorshard.verify.culprit import _matched_rows, nearest

WHOLE = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "part",
    [
        WHOLE,
        WHOLE[2:],
        WHOLE[:, 3:],
        WHOLE[..., 4:],
        WHOLE[:, [0, 5, 2]],
        WHOLE.transpose(0, 1),
        WHOLE.flatten(0, 1)[::3],
        WHOLE.transpose(0, 1)[..., :4],
    ],
    ids=["whole", "rows", "slice", "columns", "tokens", "transposed", "flat", "transposed columns"],
)
def test_a_part_is_near(part):
    assert nearest(part, WHOLE) == 0.0
    wrong = part.clone()
    wrong[-1, ..., -1] += 0.5
    assert nearest(wrong, WHOLE) > 0.1


def test_no_part():
    assert nearest(torch.randn(4, 6, 16), WHOLE) is None
    assert nearest(torch.randn(5), torch.randn(4, 2)) is None
    assert nearest(torch.ones(2), torch.tensor([3.0, 1.0, 2.0])) == 0.0  # samples of one number each


def test_of_equal_logits_the_one_with_the_gradient():
    logits = torch.ones(3, 4)
    gradients = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    index, columns = _matched_rows((logits, 0.1 * gradients[[2, 1, 0]]), (logits, gradients))
    assert index.tolist() == [2, 1, 0]
    assert logits[:, columns].shape == logits.shape
