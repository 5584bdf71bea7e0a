"""Assertions for users' own tests."""

from functools import partial

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.testing import assert_exact

_BATCH = {"inputs": torch.randn(8, 16), "targets": torch.randn(8, 4)}
_HOW = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "loss_fn": nn.functional.mse_loss, "steps": 2}


@pytest.mark.slow
def test_an_exact_plan_passes_and_has_a_hash() -> None:
    found = assert_exact(partial(nn.Linear, 16, 4), ts.Plan(zero=2), **_BATCH, **_HOW)
    assert found.ranks == 2 and len(found.hash) == 16


@pytest.mark.slow
def test_what_differs_is_described() -> None:
    class Uneven(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) - x.mean()  # of this rank's samples alone

    with pytest.raises(AssertionError, match=r"(?s)NOT EXACT.*culprit"):
        assert_exact(partial(Uneven, 16, 4), ts.Plan(zero=2), **_BATCH, **_HOW)
