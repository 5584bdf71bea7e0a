"""``ts.verify`` and ``ts.estimate`` know that ranks have parts of sequences."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import parity
import tensorshard as ts
from tensorshard.models import GPT, next_token_loss

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fields", [dict(cp=2), dict(cp=2, zero=1, cp_order="zigzag")], ids=str)
def test_verify_compares_ranks_that_share_sequences(fields):
    inputs, targets = parity.batch("gpt", 0)
    found = ts.verify(
        partial(parity.build, "gpt"), ts.Plan(**fields), inputs=inputs, targets=targets, optimizer=parity.ADAMW,
        loss_fn=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()), world_size=2,
    )  # fmt: skip
    assert found, found.describe()


def test_an_estimate_counts_a_ranks_part_of_activations():
    tokens = torch.zeros(2, 512, dtype=torch.int64)
    held = {
        cp: ts.estimate(
            partial(GPT, vocab_size=256, context_length=512, num_layers=4, num_heads=4, width=128), ts.Plan(cp=cp),
            world_size=cp, inputs=tokens, targets=tokens, optimizer=parity.ADAMW, loss_fn=next_token_loss,
        ).ranks[0].by_category["activations"]
        for cp in (1, 2, 4)
    }  # fmt: skip
    for cp in (2, 4):
        assert held[cp] <= 1.1 * held[1] / cp
