"""Offload from GPUs: the same training to rounding, as the host's kernels make the update, in less of their memory."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorshard as ts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: PyTorch sees none here"),
]

WIDTH, BLOCKS = 512, 4
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
EVERYTHING = ts.Offload(optimizer="cpu", gradients="cpu", parameters="cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.scale * hidden


def _train(fields: dict[str, Any], device: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses and weights of five steps, and the most memory that tensors took on the GPU."""
    engine = ts.parallelize(
        Model, ts.Plan(**fields), optimizer=OPTIMIZER, loss_fn=nn.functional.mse_loss, device=device
    )
    generator = torch.Generator().manual_seed(0)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    losses = []
    for _ in range(5):
        inputs, targets = torch.randn(2, 16, WIDTH, generator=generator)
        losses.append(engine.step(inputs.to(device), targets.to(device)).item())
    peak = 0 if device == "cpu" else torch.cuda.max_memory_allocated(device)
    return losses, engine.full_state_dict(), peak


def _assert_alike(plain: tuple[Any, ...], found: tuple[Any, ...], tolerance: float) -> None:
    assert found[0] == pytest.approx(plain[0], rel=tolerance)
    for name, value in plain[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=tolerance, atol=tolerance)


CASES = [
    (dict(clip_grad_norm=0.5), "cpu", 1e-5),
    (dict(micro_batches=2), "disk", 1e-5),
    (dict(precision="bf16", micro_batches=2, clip_grad_norm=0.5), "cpu", 1e-2),
    (dict(zero=3), EVERYTHING, 1e-5),
    (dict(zero=3, precision="bf16"), EVERYTHING, 1e-2),
    (dict(recompute="full"), ts.Offload(activations="cpu"), 1e-6),
    (dict(precision="bf16"), ts.Offload(optimizer="cpu", gradients="cpu", activations="disk", overlap=True), 1e-2),
]


def _in_world(rank: int, store: str, size: int, check: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=size)
    check(f"cuda:{rank}", *args)
    dist.destroy_process_group()


def _on_gpus(folder: Path, size: int, check: Callable[..., None], *args: Any) -> None:
    """Calls ``check(device, *args)`` in a process for each of `size` GPUs, since a world must not stay in this one."""
    torch.multiprocessing.spawn(_in_world, (str(folder / "store"), size, check, args), nprocs=size)


def _is_the_same(device: str, fields: dict[str, Any], offload: Any, tolerance: float) -> None:
    _assert_alike(_train(fields, device), _train({**fields, "offload": offload}, device), tolerance)


@pytest.mark.parametrize(("fields", "offload", "tolerance"), CASES)
def test_training_is_the_same(tmp_path: Path, fields: dict[str, Any], offload: Any, tolerance: float) -> None:
    _on_gpus(tmp_path, 1, _is_the_same, fields, offload, tolerance)


def _states_left(device: str, precision: str, each: int) -> None:
    numel = sum(p.numel() for p in Model().parameters())
    plain, found = (_train(dict(precision=precision, offload=offload), device)[2] for offload in (None, "cpu"))
    assert plain - found > 0.95 * each * numel  # two states, and the master of 16-bit weights


@pytest.mark.parametrize(("precision", "each"), [("fp32", 8), ("bf16", 12)])
def test_the_states_are_no_longer_on_the_gpu(tmp_path: Path, precision: str, each: int) -> None:
    _on_gpus(tmp_path, 1, _states_left, precision, each)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_training_is_the_same_on_two_gpus(tmp_path: Path, zero: int, precision: str, tolerance: float) -> None:
    fields = dict(zero=zero, precision=precision, clip_grad_norm=0.5, micro_batches=2)
    _on_gpus(tmp_path, 2, _is_the_same, fields, "cpu", tolerance)
