"""Updates that go on behind steps: whoever looks sees them finished, or learns what went wrong."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.offload.background_update import BackgroundUpdate

LOOKS: dict[str, Callable[[ts.Engine], Any]] = {
    "parameters": lambda engine: [p.detach().clone() for p in engine.model.parameters()],
    "states": lambda engine: [s["exp_avg_sq"].clone() for s in engine.optimizer.state.values()],
    "full_state_dict": lambda engine: list(engine.full_state_dict().values()),
    "evaluate": lambda engine: [engine.evaluate(*_batch(9))],
    "predict": lambda engine: [engine.predict(_batch(9)[0])],
}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 16, generator=generator), torch.randn(4, 4, generator=generator)


def _engine(
    folder: str, overlap: bool, zero: int = 2, gradients: str | None = "disk", optimizer: Any = torch.optim.AdamW
) -> ts.Engine:
    torch.manual_seed(0)
    parameters = "disk" if zero == 3 else None
    offload = ts.Offload(optimizer="disk", gradients=gradients, parameters=parameters, path=folder, overlap=overlap)
    plan = ts.Plan(zero=zero, clip_grad_norm=0.5, offload=offload)
    optimizer = partial(optimizer, lr=1e-2)
    return ts.parallelize(Blocks, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss)


def _slow(call: Callable[..., int], *args: Any, seconds: float = 0.01) -> int:
    time.sleep(seconds)
    return call(*args)


def _looks(folder: str, zero: int) -> list[str]:
    """What differs from an Engine whose steps return when the update is finished."""
    plain, found = (_engine(folder, overlap, zero) for overlap in (False, True))
    held = [(engine.model, engine.optimizer) for engine in (plain, found)]
    pwritev, differ = os.pwritev, []
    os.pwritev = partial(_slow, pwritev)  # type: ignore[assignment]
    try:
        for number, (name, look) in enumerate(LOOKS.items()):
            losses = [engine.step(*_batch(number)) for engine in (plain, found)]
            for _, optimizer in held:  # as a scheduler does; it is of the next update
                optimizer.param_groups[0]["lr"] *= 0.5
            if not torch.equal(*losses) or not all(map(torch.equal, look(plain), look(found))):
                differ.append(name)
        for engine in (plain, found):
            engine.step(*_batch(20))
        outputs = [model(_batch(21)[0]) for model, _ in held]  # of a loop of one's own
        saved = [optimizer.state_dict()["state"][0]["exp_avg"] for _, optimizer in held]
        return differ + [n for n, pair in (("forward", outputs), ("state_dict", saved)) if not torch.equal(*pair)]
    finally:
        os.pwritev = pwritev


@pytest.mark.parametrize("zero", [2, 3])
def test_what_looks_between_steps_sees_the_finished_update(ranks, tmp_path, zero):
    assert ranks(1, _looks, str(tmp_path), zero)[0] == []


class Decays(Blocks):
    """Its forwards write a parameter, as a weight decay of one's own does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.blocks[0].weight.mul_(0.75)
        return super().forward(x)


def _writes_meanwhile(folder: str) -> list[str]:
    """The weights after steps whose forwards write a parameter that the last update still moves to the disk."""
    found, pwritev = [], os.pwritev
    os.pwritev = partial(_slow, pwritev, seconds=0.1)  # type: ignore[assignment]
    try:
        for offload in (None, ts.Offload(optimizer="disk", path=folder, overlap=True)):
            torch.manual_seed(0)
            plan = ts.Plan(precision="bf16", micro_batches=4, offload=offload)
            optimizer = partial(torch.optim.AdamW, lr=1e-2)
            engine = ts.parallelize(Decays, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss)
            for number in range(4):
                engine.step(*_batch(number))
            found.append(engine.full_state_dict())
    finally:
        os.pwritev = pwritev
    plain, offloaded = found
    return [name for name, value in plain.items() if not torch.equal(offloaded[name], value)]


def test_forwards_may_write_what_an_update_still_moves(ranks, tmp_path):
    assert ranks(1, _writes_meanwhile, str(tmp_path))[0] == []


def _fails(folder: str) -> list[str]:
    """What each look says after an update that failed behind its step."""
    engine = _engine(folder, overlap=True, gradients=None)
    engine.step(*_batch(0))
    engine.wait_for_update()
    pwritev, told = os.pwritev, []

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    os.pwritev = fail  # type: ignore[assignment]
    try:
        engine.step(*_batch(1))
        engine._update.background.finish()
    finally:
        os.pwritev = pwritev
    optimizer = engine._optimizer
    for look in (lambda: engine.model, optimizer.state_dict, *[lambda: engine.step(*_batch(2))] * 2):
        try:
            look()
            told.append("nothing")
        except OSError as error:
            told.append(str(error))
    return told


def test_an_update_that_fails_is_told_until_a_step_has_stopped(ranks, tmp_path):
    *told, after = ranks(1, _fails, str(tmp_path))[0]
    assert len(told) == 3
    assert all(f"scratch file in '{tmp_path}' could not be written" in message for message in told), told
    assert after == "nothing"


@pytest.mark.slow
def test_a_program_that_ends_waits_for_its_last_update_and_shows_its_error():
    program = """
import time
from concurrent.futures import ThreadPoolExecutor
from tensorshard.offload.background_update import BackgroundUpdate

pool = ThreadPoolExecutor(1)

def written():
    time.sleep(0.3)
    pool.submit(print, "written", flush=True).result()

def fails():
    raise OSError("the disk failed")

updates = [BackgroundUpdate(), BackgroundUpdate()]
for background, update in zip(updates, (written, fails)):
    background.start(update, [], None)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout == "written\n"
    assert "OSError: the disk failed" in found.stderr


def test_the_next_update_takes_masters_in_the_order_in_which_they_were_needed():
    first, second, third = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    background = BackgroundUpdate()
    assert background.in_order([first, second, third]) == [first, second, third]
    background.wait([third])
    background.wait([first, third])
    assert [id(p) for p in background.in_order([first, second, third])] == [id(p) for p in (third, first, second)]


def test_an_optimizer_of_another_kind_is_refused(ranks, tmp_path):
    assert "offload.overlap=True was given with RMSprop" in ranks(1, _refused, str(tmp_path))[0]


def _refused(folder: str) -> str:
    with pytest.raises(ValueError) as error:
        _engine(folder, overlap=True, optimizer=torch.optim.RMSprop)
    return str(error.value)
