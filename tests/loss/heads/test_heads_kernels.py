"""What is done to tiles, compiled as GPUs run it, against the plain form, on the CPU."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorshard.loss import kernels, tiles, two_passes
from tensorshard.loss.heads import update_rule
from tensorshard.loss.tiles import Precision
from tensorshard.nn import ArcFace, ParallelLinearCrossEntropy
from tensorshard.nn.functional import parallel_linear_cross_entropy


def _train(options: dict[str, Any], steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    head = ParallelLinearCrossEntropy(64, 37, **{"keep_logits": False, **options})
    outcome = []
    for _ in range(steps):
        x, targets = torch.randn(6, 64, requires_grad=True), torch.randint(37, (6,))
        loss = head(x, targets)
        loss.backward()
        outcome += [loss.detach(), x.grad]
        if head.optimizer is not None:
            head.optimizer.step()
    return [*outcome, head.weight.detach().float() if head.optimizer is not None else head.weight.grad]


def _sgd(**options: Any) -> dict[str, Any]:
    return {"update": dict(lr=0.1, momentum=0.9, weight_decay=0.01, **options)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1, "z_loss": 1e-3},
        {"class_weight": torch.linspace(0.5, 2, 37), "label_smoothing": 0.1, "bias": True, **_sgd()},
        {"margin": ArcFace(), "scale": 8.0, **_sgd(momentum_dtype="bf16"), "dtype": torch.bfloat16},
        {**_sgd(momentum_dtype="int8"), "dtype": torch.bfloat16, "sample_rate": 0.5},
    ],
)
def test_compiled_is_the_same(options, monkeypatch):
    """Traced and decomposed as on a GPU, though not turned into Triton's kernels."""
    monkeypatch.setattr(tiles, "tile_width", lambda *_: 16)
    expected = _train(options)
    used = kernels.compiled_kernels("aot_eager_decomp_partition")
    for module in (two_passes, update_rule):
        monkeypatch.setattr(module, "choose_kernels", lambda _: used)
    torch._dynamo.reset()
    counters.clear()
    found = _train(options)
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 1 and not counters["graph_break"]
    low = options.get("dtype") is not None  # a last bit may turn which way a number is rounded
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2 if low else 1e-5, atol=2e-2 if low else 1e-6)


def test_which_are_chosen(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    assert kernels.choose_kernels(torch.zeros(2)) is kernels.REFERENCE
    with FakeTensorMode():  # a CUDA tensor, which nothing is computed of
        fake = torch.empty(2, device="cuda")
        assert kernels.choose_kernels(fake) is kernels.REFERENCE

    class OnGPU:
        device = torch.device("cuda")

    monkeypatch.setattr(kernels, "type", lambda _: torch.Tensor, raising=False)
    monkeypatch.setattr(kernels, "compiled_kernels", lambda: "compiled")
    monkeypatch.setattr(kernels, "can_compile", lambda _: True)
    assert kernels.choose_kernels(OnGPU()) == "compiled"
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert kernels.choose_kernels(OnGPU()) is kernels.REFERENCE


NO_COMPILER = """
import logging, torch
logging.basicConfig()
from tensorshard.loss import kernels
print(kernels.can_compile(torch.device("cpu")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [False, True])
def test_without_a_compiler_nothing_is_compiled(tmp_path, compiler):
    """On the CPU, whose kernels need one as Triton does."""
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if not compiler:
        variables.pop("CXX", None)
        variables["PATH"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", NO_COMPILER], capture_output=True, text=True, env=variables, check=True
    )
    assert done.stdout.strip() == str(compiler), done.stderr
    assert ("it needs Triton, a C compiler and Python's headers" in done.stderr) != compiler


def test_a_gpu_without_a_compiler_takes_plain_operations(monkeypatch, caplog):
    class OnGPU:
        device = torch.device("cuda")

    monkeypatch.setattr(kernels, "type", lambda _: torch.Tensor, raising=False)
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())

    def fails() -> kernels.Kernels:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(kernels, "compiled_kernels", fails)
    kernels.can_compile.cache_clear()
    monkeypatch.setattr(torch, "zeros", lambda shape, device: torch.empty(shape))  # there is no such device here
    try:
        for _ in range(2):
            assert kernels.choose_kernels(OnGPU()) is kernels.REFERENCE
    finally:
        kernels.can_compile.cache_clear()
    assert caplog.text.count("Failed to find C compiler") == 1


def test_narrow_products_as_on_a_gpu(monkeypatch):
    """A GPU multiplies in bf16 and sums in fp32; here the products are fp32's, of what was rounded to bf16."""
    monkeypatch.setattr(tiles, "tile_width", lambda *_: 16)
    mm = torch.mm

    def wide_mm(left: torch.Tensor, right: torch.Tensor, out_dtype: Any = None, *, out: Any = None) -> torch.Tensor:
        return mm(left.to(out_dtype), right.to(out_dtype), out=out) if out_dtype else mm(left, right, out=out)

    exact = _train({"label_smoothing": 0.1})
    updated = _train(_sgd())
    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(Precision, "choose", lambda *_: Precision(torch.bfloat16, torch.float32))
    for options, expected in (({"label_smoothing": 0.1}, exact), (_sgd(), updated)):
        for got, want in zip(_train(options), expected, strict=True):
            assert got.dtype == torch.float32 and not torch.equal(got, want)
            assert (got - want).norm() < 2.0**-6 * want.norm()


def test_shapes_and_types_on_another_device():
    """On the meta device, where nothing is computed, every operation still checks what it is given."""
    for dtype in (torch.bfloat16, torch.float32):
        for options in ({}, {"keep_logits": True}, {"label_smoothing": 0.1}, {"normalize": True, "margin": ArcFace()}):
            x, w = (torch.randn(n, 32, device="meta", dtype=dtype, requires_grad=True) for n in (64, 1000))
            loss = parallel_linear_cross_entropy(x, w, torch.randint(1000, (64,), device="meta"), **options)
            loss.backward()
            assert loss.dtype == torch.float32 and w.grad.dtype == x.grad.dtype == dtype and w.grad.shape == (1000, 32)
