"""The operations of a step are counted as they run: not those of recomputation, and against the devices' peak."""

from functools import partial

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.common.words import flops_words, span_words
from tensorshard.predict import Estimate
from tensorshard.predict.hardware import assumed_cpu, find_hardware
from tensorshard.trainer.hooks.metrics import StepWork, _Span
from tensorshard.trainer.trainer import BatchSize

WIDTH, SAMPLES = 8, 4
FORWARD = 3 * 2 * SAMPLES * WIDTH * WIDTH


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _estimate(world_size: int = 1, hardware: object = "h100", **fields: object) -> Estimate:
    batch = torch.zeros(SAMPLES, WIDTH)
    return ts.estimate(
        Model,
        ts.Plan(**fields),
        world_size=world_size,
        inputs=batch,
        targets=batch,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=nn.functional.mse_loss,
        hardware=hardware,
    )


def test_what_is_computed_again_does_not_count() -> None:
    plain, recomputed = _estimate(), _estimate(recompute="full")
    step = 3 * FORWARD - FORWARD // 3  # the batch itself needs no gradient
    assert plain.model_flops == recomputed.model_flops == plain.ranks[0].flops == step
    assert recomputed.ranks[0].flops == step + FORWARD
    assert _estimate(2, zero=3).model_flops == 2 * step


@pytest.mark.slow
def test_the_peak_is_that_of_all_devices_and_of_the_type() -> None:
    rates = find_hardware("h100").rates  # type: ignore[union-attr]
    assert rates is not None
    assert _estimate(2).peak_flops == pytest.approx(2 * rates.flops["float32"])
    assert _estimate(precision="bf16").peak_flops == pytest.approx(rates.flops["bfloat16"])
    assumed = _estimate(hardware=assumed_cpu())
    assert assumed.peak_flops is None and _estimate(hardware=None).step_span is None
    low, high = assumed.step_span or (0.0, 0.0)
    assert high > 25 * low > 0 and "(" in assumed.time_words()


def test_rates_are_of_batches_of_the_size_that_was_counted() -> None:
    batch = BatchSize(4, 64)
    span = _Span(StepWork(1000, 2000.0, batch))
    span.add(2.0, batch)
    assert (span.rates()["flops_per_second"], span.rates()["mfu"]) == (500.0, 0.25)
    span.add(1.0, BatchSize(4, 32))
    assert "flops_per_second" not in span.rates() and "tokens_per_second" in span.rates()


def test_words() -> None:
    assert span_words(0.031, (0.024, 0.0422)) == "31.0 ms (24.0 to 42.2 ms)"
    assert span_words(2.5, (0.5, 250.0)) == "2.50 s (0.50 to 250 s)" and span_words(0.5, None) == "500.00 ms"
    assert (flops_words(999), flops_words(3.1e13)) == ("999 FLOP", "31.0 TFLOP")
