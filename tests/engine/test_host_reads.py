"""How often a step has the host wait for its device: reads of values, and tensors made of Python numbers.

They are counted on CPUs, where they cost nothing, by the calls that would wait on a GPU. Ranks compare their batches
through the half of their groups that is the host's: that waits for no GPU, and does not count.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import tensorshard as ts
from tensorshard.models import GPT

_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "nonzero", "cpu", "numpy")
# Values that are the host's, and checks that are left out on GPUs.
_HOST = {("same_batch.py", "_gathered"), ("gradients.py", "_is_one"), ("arguments.py", "check_indices"),
         ("equal_backwards.py", "hold")}  # fmt: skip
_MAKES = ("tensor", "as_tensor")


def _frames() -> Iterator[tuple[str, str]]:
    frame = sys._getframe(2)
    while frame is not None:
        yield Path(frame.f_code.co_filename).name, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


@contextmanager
def _counted(reads: Counter[tuple[str, str]], phase: list[str]) -> Iterator[None]:
    """Inside, `reads` counts waits in each `phase`."""

    def counting(original: Callable[..., Any], makes: bool) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if not (makes and options.get("device") is None) and not _HOST.intersection(_frames()):
                reads["numbers to the device" if makes else "reads", phase[0]] += 1
            return original(*args, **options)

        return called

    patches = [mock.patch.object(torch.Tensor, name, counting(getattr(torch.Tensor, name), False)) for name in _READS]
    patches += [mock.patch.object(torch, name, counting(getattr(torch, name), True)) for name in _MAKES]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _reads(fields: dict[str, Any]) -> dict[Any, int]:
    phase = ["forward"]

    def begin_backward(_: torch.Tensor) -> None:
        phase[0] = "backward"

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        phase[0] = "loss"
        if output.requires_grad:
            output.register_hook(begin_backward)
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    model = partial(GPT, vocab_size=16, context_length=8, num_layers=2, num_heads=2, width=16)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=optimizer, loss_fn=loss_fn, device="cpu")
    batch = torch.arange(32).view(4, 8) % 16, torch.arange(32).view(4, 8) % 7
    for _ in range(3):
        engine.step(*batch)
    reads: Counter[tuple[str, str]] = Counter()
    phase[0] = "forward"
    with _counted(reads, phase):
        engine.step(*batch)
    return dict(reads)


@pytest.mark.parametrize(
    ("most", "fields"),
    [
        (1, dict(zero=1, clip_grad_norm=1.0, micro_batches=2)),
        (1, dict(zero=0)),
        (1, dict(zero=2, precision="bf16", clip_grad_norm=1.0)),
        (1, dict(zero=1, precision="fp16", clip_grad_norm=1.0)),  # whether gradients overflowed is in the same one
        (2, dict(zero=3, clip_grad_norm=1.0, micro_batches=2)),
        (2, dict(tp=2, clip_grad_norm=1.0)),
        (2, dict(pp=2, micro_batches=2, clip_grad_norm=1.0)),
    ],
    ids=str,
)
def test_reads_in_a_step(ranks, most, fields):
    for counted in ranks(2, _reads, fields):
        assert sum(count for (kind, _), count in counted.items() if kind == "reads") <= most, counted
        assert not [phase for _, phase in counted if phase == "loss"], counted
