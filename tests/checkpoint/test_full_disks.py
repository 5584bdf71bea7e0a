"""Disks that are full or read-only: a sentence with the path, and the checkpoint before stays whole."""

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import tensorshard as ts
from tensorshard.checkpoint.integrity import check


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk in memory that has room for one checkpoint of :func:`_engine`, and not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs the right to mount a disk in memory")
    yield disk
    subprocess.run(["umount", disk], check=True)


def _engine() -> ts.Engine:
    adamw, mse = partial(torch.optim.AdamW, lr=1e-3), torch.nn.functional.mse_loss
    return ts.parallelize(partial(torch.nn.Linear, 256, 128), ts.Plan(zero=3), optimizer=adamw, loss_fn=mse)


def _step(engine: ts.Engine) -> float:
    generator = torch.Generator().manual_seed(engine.step_count)
    return engine.step(torch.randn(8, 256, generator=generator), torch.randn(8, 128, generator=generator)).item()


def _said(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _save_twice(disk: Path, background: bool) -> tuple[str, list[str], int, list[float]]:
    engine = _engine()
    _step(engine)
    engine.save(disk / "step-1")

    def again() -> None:
        engine.save(disk / "step-2", background=background)
        engine.wait_for_save()

    said = _said(again)
    torch.distributed.barrier()
    losses = [_step(engine) for _ in range(2)]  # training can go on
    other = _engine()
    other.load(disk / "step-1")
    return (
        said,
        sorted(file.name for file in disk.iterdir()),
        other.step_count,
        [*losses, *(_step(other) for _ in "ab")],
    )


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(ranks, small_disk, background):
    found = ranks(2, _save_twice, small_disk, background)
    for _, files, steps, losses in found:
        assert files == ["step-1"] and steps == 1 and losses[:2] == losses[2:]
    assert any("step-2" in said and "No space left" in said for said, *_ in found)
    assert all(said.startswith(("OSError", "RuntimeError")) for said, *_ in found)
    check(small_disk / "step-1")


def _save_once(path: Path) -> str:
    engine = _engine()
    _step(engine)
    return _said(engine.save, path)


def test_a_disk_that_is_read_only(ranks, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for said in ranks(2, _save_once, small_disk / "step-1"):
        assert "step-1" in said and "Read-only file system" in said and "nothing was written" in said
