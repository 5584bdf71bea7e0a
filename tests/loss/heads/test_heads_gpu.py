"""The head on a GPU, with each kind of kernels, against fp64 on the CPU."""

from typing import Any

import pytest
import torch

from tensorshard.loss import kernels, tiles, two_passes
from tensorshard.loss.heads import update_rule
from tensorshard.loss.kernels import Noise, block_size
from tensorshard.nn import ArcFace, ParallelLinearCrossEntropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, with Triton: PyTorch sees none here"
    ),
]

CLASSES, FEATURES, SAMPLES = 1003, 64, 37
KERNELS = {"reference": lambda _: kernels.REFERENCE, "compiled": kernels.choose_kernels}
SGD = dict(lr=0.1, momentum=0.9, weight_decay=0.01)
FORMS = {
    "plain": {},
    "smoothing, z-loss": {"label_smoothing": 0.1, "z_loss": 1e-3},
    "class weights, bias": {"class_weight": torch.linspace(0.5, 2, CLASSES), "label_smoothing": 0.1, "bias": True},
    "margin": {"margin": ArcFace(), "scale": 8.0},
    "update": {"update": SGD},
    "update, class weights, bias": {"class_weight": torch.linspace(0.5, 2, CLASSES), "bias": True, "update": SGD},
}


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "tile_width", lambda *_: 256)  # the last is narrower


@pytest.fixture(params=KERNELS)
def used(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for module in (two_passes, update_rule):
        monkeypatch.setattr(module, "choose_kernels", KERNELS[request.param])
    return request.param


def _train(
    options: dict[str, Any], device: str, dtype: torch.dtype, autocast: bool = False, steps: int = 3
) -> dict[str, torch.Tensor]:
    """Some steps of the same head on the same batches, whatever the device and the type."""
    torch.manual_seed(0)
    drawn = ParallelLinearCrossEntropy(FEATURES, CLASSES, bias=bool(options.get("bias")))
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    head = ParallelLinearCrossEntropy(FEATURES, CLASSES, **{"device": device, "dtype": dtype, **options})
    with torch.no_grad():
        for own, given in zip(head.parameters(), drawn.parameters(), strict=True):
            own.detach().copy_(given.detach())
    outcome: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        # Of few bits, so that they are the same in every type.
        x = torch.randn(SAMPLES, FEATURES, generator=generator).mul_(8).round_().div_(8)
        targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        targets[step] = -100
        x = x.to(device, torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = head(x, targets.to(device))
        loss.backward()
        assert x.grad is not None
        outcome |= {f"loss {step}": loss.detach(), f"input's gradient {step}": x.grad}
        if head.optimizer is not None:
            head.optimizer.step()
    for name, parameter in head.named_parameters():
        kept = parameter.detach() if head.optimizer is not None else parameter.grad
        assert kept is not None
        outcome[name] = kept
    return {name: value.double().cpu() for name, value in outcome.items()}


def _assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float) -> None:
    """Each tensor is off by at most `most` of its length."""
    off = {name: _off(found[name], want) for name, want in expected.items()}
    assert max(off.values()) <= most, off


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("keep", [False, None, True], ids=["lean", "kept where small", "kept in bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_as_in_fp64(form, keep, used):
    expected = _train({**FORMS[form], "keep_logits": False}, "cpu", torch.float64)
    found = _train({**FORMS[form], "keep_logits": keep}, "cuda", torch.float32)
    _assert_near(found, expected, 1e-2 if keep else 2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_fp64_itself(form, used):
    expected = _train({**FORMS[form], "keep_logits": False}, "cpu", torch.float64)
    found = _train({**FORMS[form], "keep_logits": False}, "cuda", torch.float64)
    _assert_near(found, expected, 1e-12)


@pytest.mark.parametrize("keep", [False, True], ids=["lean", "kept in bf16"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "margin"])
def test_autocast_multiplies_in_bf16(form, keep, used):
    expected = _train({**FORMS[form], "keep_logits": False}, "cpu", torch.float64)
    found = _train({**FORMS[form], "keep_logits": keep}, "cuda", torch.float32, autocast=True)
    _assert_near(found, expected, 2e-2)
    assert _off(found["input's gradient 0"], expected["input's gradient 0"]) > 1e-4  # it did round


@pytest.mark.parametrize("momentum_dtype", ["bf16", "int8"])
def test_narrow_states(momentum_dtype, used):
    expected = _train({"update": SGD}, "cpu", torch.float64)
    options = {"update": {**SGD, "momentum_dtype": momentum_dtype}}
    found = _train(options, "cuda", torch.bfloat16, autocast=True)
    _assert_near(found, expected, 3e-2)


def test_narrow_states_are_kept_without_waiting_for_the_gpu(used):
    """A step asks for no number from the GPU: what it computes is queued."""
    options = {"dtype": torch.bfloat16, "update": {**SGD, "momentum_dtype": "int8"}, "keep_logits": False}
    head = ParallelLinearCrossEntropy(FEATURES, CLASSES, device="cuda", **options)
    x = torch.randn(SAMPLES, FEATURES, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(CLASSES, (SAMPLES,), device="cuda")
    assert head.optimizer is not None
    for warm in (True, True, False):  # at first kernels are compiled and states are made
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            head(x, targets).backward()
            head.optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_sampled_classes(used):
    options = {"sample_rate": 0.5, "dtype": torch.bfloat16, "update": {**SGD, "momentum_dtype": "int8"}}
    found = _train(options, "cuda", torch.bfloat16, autocast=True)
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 129), (37, 4099), (3, 65536)])
def test_compiled_kernels(shape, dtype):
    """Against the reference, on tiles of odd sizes."""
    rows, width = shape
    logits = torch.randn(shape, device="cuda", dtype=dtype) * 5
    outcomes = []
    for chosen in (kernels.REFERENCE, kernels.compiled_kernels()):
        tile, total = logits.clone(), torch.zeros(rows, device="cuda", dtype=torch.float64)
        reference = chosen.online_softmax(tile, logits[:, 0].clone(), total)
        class_weight = torch.linspace(0.5, 2, width, device="cuda", dtype=dtype)
        slope = chosen.softmax_slope(logits.clone(), reference, reference[:, None], reference, class_weight)
        outcomes.append((tile, reference, total, slope))
    for found, expected in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 128), (513, 2048), (7, 509)])
def test_compiled_rounding(shape):
    values = torch.randn(shape, device="cuda")
    bits = Noise(values.numel(), 3, values.device).bits(values.shape)
    outcomes = []
    for chosen in (kernels.REFERENCE, kernels.compiled_kernels()):
        codes = torch.empty(shape, dtype=torch.int8, device="cuda")
        scales = torch.empty(shape[0], shape[1] // block_size(shape[1]), device="cuda")
        chosen.quantize(values.clone(), bits, torch.empty_like(values), codes, scales)
        numbers = chosen.dequantize(codes, scales, torch.empty_like(values))
        outcomes.append((chosen.round_to_bfloat16_(values.clone(), bits), scales, codes.int(), numbers))
    for found, expected in zip(outcomes[1][:2], outcomes[0][:2], strict=True):
        assert torch.equal(found, expected)
    # A last bit of a quotient may decide which of two neighbouring codes it is.
    differ = (outcomes[1][2] - outcomes[0][2]).abs()
    assert differ.max() <= 1 and differ.sum() <= 1 + differ.numel() // 1000
    torch.testing.assert_close(outcomes[1][3][differ == 0], outcomes[0][3][differ == 0], rtol=1e-5, atol=0)
