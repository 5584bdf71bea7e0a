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
from tensorshard.comm.sharding import to_local
from tensorshard.engine import gradients
from tensorshard.models import GPT

_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "nonzero", "cpu", "numpy")
# Values that are the host's, and checks that are left out on GPUs.
_HOST = {("wrong_batch.py", "_gathered"), ("gradients.py", "_is_one"), ("arguments.py", "check_indices"),
         ("gradient_reducer.py", "hold")}  # fmt: skip
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


# -- updates that are launched before the host knows that they are to be taken --


def _trained_by(fields: dict[str, Any], early: bool) -> tuple[list[Any], dict[str, torch.Tensor], list[bool]]:
    """Losses, or errors, and the weights and states of steps some of whose gradients are not finite; and which updates
    were launched early, and then taken."""
    taken: list[bool] = []
    conclude = gradients.FinalGradients.conclude

    def noted(self: Any, check: Any) -> bool:
        taken.append(conclude(self, check))
        return taken[-1]

    model = partial(GPT, vocab_size=16, context_length=8, num_layers=2, num_heads=2, width=16)
    factor = [1.0]

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten()) * factor[0]

    with (
        mock.patch.object(gradients, "_reads_later", lambda _: early),
        mock.patch.object(gradients.FinalGradients, "conclude", noted),
    ):
        adamw = partial(torch.optim.AdamW, lr=1e-2)
        engine = ts.parallelize(model, ts.Plan(**fields), optimizer=adamw, loss_fn=loss_fn, device="cpu")
        found: list[Any] = []
        for step in range(7):
            inputs = (torch.arange(64).view(8, 8) * (step + 3)) % 16
            batch = [part.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for part in (inputs, (inputs + 1) % 7)]
            factor[0] = {3: 1e30, 4: float("nan")}.get(step, 1.0)  # squares of the gradient overflow; a wrong loss
            if step == 5:
                with torch.no_grad():
                    next(iter(engine.model.parameters())).mul_(0.5)  # on all ranks
            try:
                found.append(engine.step(*batch).item())
            except gradients.NonFiniteLossError as error:
                found.append(str(error))
            found.append(engine.scaler and engine.scaler.state_dict())
        state = {name: value.clone() for name, value in engine.full_state_dict().items()}
        for index, values in enumerate(engine.optimizer.state.values()):
            state |= {f"{index} {name}": to_local(value).clone() for name, value in values.items()}
        return found, {name: to_local(value) for name, value in state.items()}, taken


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        dict(zero=1, precision="fp16", clip_grad_norm=1.0),
        pytest.param(dict(zero=0), marks=pytest.mark.slow),
        pytest.param(dict(zero=2, micro_batches=2, clip_grad_norm=0.1), marks=pytest.mark.slow),
        pytest.param(dict(zero=3, precision="bf16", clip_grad_norm=1.0), marks=pytest.mark.slow),
        pytest.param(dict(zero=3, precision="fp16"), marks=pytest.mark.slow),
        pytest.param(dict(tp=2, clip_grad_norm=1.0), marks=pytest.mark.slow),
        pytest.param(dict(pp=2, micro_batches=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_updates_that_are_launched_early_change_no_bit(ranks, fields):
    for plain, early in zip(ranks(2, _trained_by, fields, False), ranks(2, _trained_by, fields, True), strict=True):
        assert str(early[0]) == str(plain[0])  # NaN is not equal to itself
        assert early[1].keys() == plain[1].keys()
        for name, value in plain[1].items():
            assert torch.equal(early[1][name], value), name
        assert not plain[2] and early[2].count(True) >= 2 and early[2].count(False) >= 2, early[2]
