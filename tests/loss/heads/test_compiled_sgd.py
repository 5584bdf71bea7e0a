"""Narrow states updated in one pass: what torch's functions make of the same gradients and random bits."""

from unittest import mock

import pytest
import torch

from tensorshard.loss.heads import update_rule
from tensorshard.loss.heads.update_rule import ParameterShard, Rule, Update
from tensorshard.loss.kernels import REFERENCE, block_size
from tensorshard.loss.tiles import Precision, Tiles

SAMPLES = 6
ROWS = 37


def _updated(weight: torch.dtype, momentum: torch.dtype, features: int, complete: bool) -> list[torch.Tensor]:
    """Weight, momentum and scales after five gradients."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(ROWS, features, generator=generator).mul_(0.05).to(weight)
    scales = torch.zeros(ROWS, features // block_size(features)) if momentum == torch.int8 else None
    shard = ParameterShard(weights, torch.zeros(ROWS, features, dtype=momentum), scales)
    input = torch.randn(SAMPLES, features, generator=generator)
    tiles = Tiles(input, weights, None, None, None, Precision(torch.float32, torch.float32))
    for step in range(5):
        update = Update(tiles, shard, None, Rule(0.9, complete, 0.1, 1e-3), seed=step)
        for tile in tiles:
            update.put_product(tile, torch.randn(tile.width, SAMPLES, generator=generator))
    return [shard.weight, shard.momentum, *([] if shard.scales is None else [shard.scales])]


@pytest.mark.skipif(update_rule._functions() is None, reason="needs a C compiler")
@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("features", [128, 40, 7])
@pytest.mark.parametrize("weight, momentum", update_rule._combinations())
def test_one_pass_is_many(weight, momentum, features, complete):
    with mock.patch.object(update_rule, "sgd_in_one_pass", wraps=update_rule.sgd_in_one_pass) as step:
        found = _updated(weight, momentum, features, complete)
    assert step.called
    with (
        mock.patch.object(update_rule, "choose_kernels", lambda _: REFERENCE),
        mock.patch.object(update_rule, "_functions", lambda: None),
    ):
        expected = _updated(weight, momentum, features, complete)
    for one, other in zip(found, expected, strict=True):
        # Some processors round a product and a sum once, some twice: a few numbers are then the neighbouring one.
        differs = one.float() != other.float()
        assert differs.float().mean() < 0.02
        torch.testing.assert_close(
            one.float(), other.float(), rtol=2**-7, atol=1.0 if one.dtype == torch.int8 else 1e-6
        )
