import math

import pytest
import torch
from torch.nn import functional as F

from tensorshard.models import image_classification_loss, masked_token_loss, next_token_loss


@pytest.mark.parametrize("loss", [next_token_loss, masked_token_loss])
def test_sum_over_count_is_the_mean_over_targets_that_count(loss):
    logits = torch.randn(2, 6, 11)
    targets = torch.randint(11, (2, 6))
    targets[0, :4] = -100
    total, count = loss(logits, targets)
    assert count == 8
    assert count.dtype == torch.float32
    kept = targets != -100
    torch.testing.assert_close(total / count, F.cross_entropy(logits[kept], targets[kept]))


def test_sums_and_counts_add_up_over_a_split_batch():
    logits, targets = torch.randn(4, 6, 11), torch.randint(11, (4, 6))
    targets[0] = -100
    whole = next_token_loss(logits, targets)
    halves = [next_token_loss(logits[part], targets[part]) for part in (slice(2), slice(2, 4))]
    for index in range(2):
        torch.testing.assert_close(whole[index], halves[0][index] + halves[1][index])


def test_a_batch_without_targets_adds_nothing():
    logits = torch.randn(1, 3, 7, requires_grad=True)
    total, count = next_token_loss(logits, torch.full((1, 3), -100))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0.0)
    assert logits.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_summed_in_fp32(dtype):
    # In fp16 this sum would be infinite, in bf16 it would have stopped growing.
    logits = torch.zeros(64, 512, 16, dtype=dtype)
    targets = torch.zeros(64, 512, dtype=torch.int64)
    total, count = next_token_loss(logits, targets)
    assert total.dtype == torch.float32
    assert (total / count).item() == pytest.approx(math.log(16), rel=1e-5)
    assert image_classification_loss(logits[0], targets[0]).dtype == torch.float32


def test_fp64_logits_stay_so():
    total, count = next_token_loss(torch.zeros(1, 2, 3, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.int64))
    assert (total.dtype, count.dtype) == (torch.float64, torch.float64)


def test_classification_loss_is_the_mean():
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    torch.testing.assert_close(image_classification_loss(logits, labels), F.cross_entropy(logits, labels))
