"""The head's hand-written Triton kernels against the reference functions, in Triton's interpreter.

Run by test_heads_kernels.py in a process of its own: the interpreter has to be asked for before Triton is imported.
"""

import os
from typing import Any

import pytest
import torch

from tensorshard.loss.heads.loss import two_passes as passes
from tensorshard.loss.heads.tiles import kernels, tiles, triton_kernels
from tensorshard.loss.heads.tiles.rounding import Noise, block_size
from tensorshard.loss.heads.update import update_rule as update
from tensorshard.nn import ParallelLinearCrossEntropy

assert os.environ.get("TRITON_INTERPRET") == "1"

SHAPES = [(1, 1), (1, 37), (5, 128), (3, 129), (2, 4096), (7, 4099), (0, 16)]
EXACT = {torch.float32: dict(rtol=2e-6, atol=1e-7), torch.float64: dict(rtol=1e-13, atol=1e-14)}


def _logits(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 10_000 + width)
    return torch.randn(rows, width, dtype=dtype, generator=generator) * 5


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("shape", SHAPES)
def test_online_softmax(shape, dtype):
    """Over two tiles, of which the second may have the larger logits, or the smaller ones."""
    rows, width = shape
    for shift in (-3.0, 3.0):
        outcomes = []
        for function in (kernels.online_softmax, triton_kernels.online_softmax):
            reference = torch.full((rows,), -torch.inf, dtype=dtype)
            total = torch.zeros(3, rows, dtype=torch.float64)[1]
            first, second = _logits(rows, width, dtype), _logits(rows, width + 3, dtype) + shift
            before = second.clone()
            reference = function(second, function(first, reference, total), total)
            both = torch.cat([_logits(rows, width, dtype), before], 1).double()
            torch.testing.assert_close(reference + total.log(), both.logsumexp(1), rtol=1e-5, atol=1e-5)
            outcomes.append((first, second, reference, total))
        for expected, found in zip(*outcomes, strict=True):
            torch.testing.assert_close(found, expected, **EXACT[dtype])


def test_a_broken_logit_is_not_hidden():
    for broken in (torch.nan, torch.inf):
        logits, total = _logits(2, 37, torch.float32), torch.zeros(2, dtype=torch.float64)
        logits[1, 5] = broken
        triton_kernels.online_softmax(logits, torch.full((2,), -torch.inf), total)
        assert total.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extras", ["", "smoothing", "smoothing, class weights"])
def test_softmax_slope(shape, dtype, extras):
    rows, width = shape
    reference, of_softmax = _logits(rows, width, dtype).amax(1), torch.rand(rows, 1, dtype=dtype)
    smoothing = torch.rand(rows, dtype=dtype) if extras else None
    class_weight = torch.rand(2 * width, dtype=dtype)[width:] if "class" in extras else None
    expected, found = (
        function(_logits(rows, width, dtype), reference, of_softmax, smoothing, class_weight)
        for function in (kernels.softmax_slope, triton_kernels.softmax_slope)
    )
    torch.testing.assert_close(found, expected, **EXACT[dtype])
    assert not torch.equal(found, _logits(rows, width, dtype)) or not rows


@pytest.mark.parametrize("shape", [(1,), (1000,), (3, 341), (17, 128), (0, 8)])
def test_rounding_is_the_same_to_the_bit(shape):
    values = torch.randn(shape) * 100
    noise = Noise(values.numel(), 1, values.device)
    bits = noise.bits(values.shape)
    expected = kernels.round_to_bfloat16_(values.clone(), bits)
    assert torch.equal(triton_kernels.round_to_bfloat16_(values.clone(), bits), expected)
    assert torch.equal(expected, expected.bfloat16().float())
    assert not values.numel() or not torch.equal(expected, values)


@pytest.mark.parametrize("shape", [(1, 128), (5, 256), (3, 96), (4, 37), (19, 509), (2, 2050)])
def test_eight_bits(shape):
    rows, features = shape
    values = torch.randn(shape) * torch.logspace(-6, 6, rows)[:, None]
    if rows > 1:
        values[1] = 0
    bits = Noise(values.numel(), 2, values.device).bits(values.shape)
    outcomes = []
    for used in (kernels.REFERENCE, kernels.triton_kernels()):
        codes = torch.full(shape, 99, dtype=torch.int8)
        scales = torch.full((rows, features // block_size(features)), 99.0)
        used.quantize(values.clone(), bits, torch.empty_like(values), codes, scales)
        outcomes.append((codes, scales, used.dequantize(codes, scales, torch.empty_like(values))))
    (codes, scales, numbers), (own_codes, own_scales, own_numbers) = outcomes
    assert torch.equal(own_scales, scales)
    # Where a quotient's last bit decides which way is rounded, a code may be the neighbouring one.
    differ = (own_codes.int() - codes.int()).abs()
    assert differ.max() <= 1 and differ.sum() <= max(1, differ.numel() // 10_000)
    same = differ == 0
    torch.testing.assert_close(own_numbers[same], numbers[same], rtol=1e-6, atol=0)
    assert (own_numbers - values).abs().amax(1).le(scales.amax(1) * 2 / 127).all()


def test_a_broken_number_is_not_hidden_in_eight_bits():
    values = torch.ones(2, 64)
    values[0, 3] = torch.nan
    codes, scales = torch.empty(2, 64, dtype=torch.int8), torch.empty(2, 1)
    bits = torch.zeros(2, 64, dtype=torch.int32)
    triton_kernels.quantize(values, bits, torch.empty(0), codes, scales)
    found = triton_kernels.dequantize(codes, scales, torch.empty(2, 64))
    assert found[0].isnan().all() and torch.equal(found[1], values[1])


def test_tiny_blocks_are_zeros_as_in_the_reference():
    values = torch.full((1, 64), 1e-40)
    for used in (kernels.REFERENCE, kernels.triton_kernels()):
        codes, scales = torch.full((1, 64), 9, dtype=torch.int8), torch.empty(1, 1)
        bits = torch.zeros(1, 64, dtype=torch.int32)
        used.quantize(values.clone(), bits, torch.empty_like(values), codes, scales)
        assert not codes.any()


def test_only_contiguous_tensors_are_taken():
    with pytest.raises(ValueError, match=r"a tensor \[3, 2\] of strides \[1, 3\] was given.*call .contiguous\(\)"):
        triton_kernels.online_softmax(torch.ones(2, 3).t(), torch.ones(3), torch.ones(3, dtype=torch.float64))


def _train(options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    head = ParallelLinearCrossEntropy(64, 37, **{"keep_logits": False, **options})
    outcome = []
    for _ in range(2):
        x, targets = torch.randn(6, 64, dtype=head.weight.dtype, requires_grad=True), torch.randint(37, (6,))
        loss = head(x, targets)
        loss.backward()
        outcome += [loss.detach(), x.grad]
        if head.optimizer is not None:
            head.optimizer.step()
    return [*outcome, head.weight.detach() if head.optimizer is not None else head.weight.grad]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float64},
        {"label_smoothing": 0.1, "class_weight": torch.linspace(0.5, 2, 37), "bias": True},
        {"keep_logits": True, "update": dict(lr=0.1, momentum=0.9)},
        {"dtype": torch.bfloat16, "update": dict(lr=0.1, momentum=0.9, momentum_dtype="bf16")},
        {"dtype": torch.bfloat16, "update": dict(lr=0.1, momentum=0.9, momentum_dtype="int8")},
    ],
)
def test_a_head_is_the_same(options, monkeypatch):
    monkeypatch.setattr(tiles, "tile_width", lambda *_: 16)
    expected = _train(options)
    for module in (passes, update):
        monkeypatch.setattr(module, "choose_kernels", lambda _: kernels.triton_kernels())
    low = options.get("dtype") == torch.bfloat16  # a last bit may turn which way a number is rounded
    for found, want in zip(_train(options), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=2e-2 if low else 1e-5, atol=2e-2 if low else 1e-6)
