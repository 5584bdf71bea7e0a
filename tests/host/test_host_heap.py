"""Whether a CPU rank keeps freed memory for its next step: only where there is room."""

import subprocess
import sys
from functools import partial

import pytest
import torch

import tensorshard as ts
from tensorshard.host import heap as host_heap
from tensorshard.host.heap import HostHeap
from tensorshard.host.memory import HeldMemory

MIB = 1 << 20


class _Machine:
    """Stands for the machine: what a rank holds, what it may hold, and what glibc was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 100 * MIB
        self.room = 150 * MIB
        self.mapped: list[int] = []
        self.given_back = 0
        monkeypatch.setattr(host_heap, "held_memory", lambda: HeldMemory(80 * MIB, self.peak))
        monkeypatch.setattr(host_heap, "room_for_rank", lambda ranks: self.room)
        monkeypatch.setattr(host_heap, "map_tensors_from", self.mapped.append)
        monkeypatch.setattr(host_heap, "set_for_training", self._set)
        monkeypatch.setattr(host_heap, "give_back_free_memory", self._give_back)

    def _set(self, nbytes: int) -> bool:
        self.mapped.append(nbytes)
        return True

    def _give_back(self) -> None:
        self.given_back += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    return _Machine(monkeypatch)


@pytest.mark.parametrize(("fields", "kept"), [(dict(zero=0), 32 * MIB), (dict(zero=3), 16 * MIB)])
def test_freed_memory_is_kept_where_there_is_room(machine, fields, kept):
    heap = HostHeap(2, spares_memory=ts.Plan(**fields).spares_memory)
    machine.room = 10 * machine.peak
    for _ in range(20):
        heap.after_call()
    assert machine.mapped == [256 << 10, kept]
    assert not machine.given_back


def test_scarce_memory_is_given_back_and_said_once(machine, caplog):
    heap = HostHeap(2, say=True)
    with caplog.at_level("INFO", logger="tensorshard"):
        for _ in range(20):
            heap.after_call()
    assert machine.mapped == [256 << 10]
    [said] = [record.getMessage() for record in caplog.records]
    assert "held 100 MiB of the 150 MiB" in said


def test_a_rank_that_keeps_memory_gives_it_back_before_there_is_none(machine):
    heap = HostHeap(2)
    machine.room = 250 * MIB
    heap.after_call()
    assert heap.keeps
    machine.peak = 240 * MIB  # with holes in the heap
    heap.after_call()
    assert not heap.keeps
    assert machine.mapped == [256 << 10, 32 * MIB, 256 << 10]
    assert machine.given_back == 1
    for _ in range(20):
        heap.after_call()
    assert machine.mapped == [256 << 10, 32 * MIB, 256 << 10]  # the peak says that there is no room for twice as much


def test_offloaded_parameters_keep_nothing(machine):
    heap = HostHeap(1, keeps_nothing=True)
    machine.room = 100 * machine.peak
    heap.after_call()
    assert not heap.keeps


def _steps(plan: ts.Plan) -> list[bool]:
    """Whether freed memory is kept after each of some steps of a real Engine."""
    build = partial(torch.nn.Linear, 64, 64)
    loss = torch.nn.functional.mse_loss
    optimizer = partial(torch.optim.SGD, lr=0.1)
    engine = ts.parallelize(build, plan, optimizer=optimizer, loss_fn=loss, device="cpu")
    kept = []
    for _ in range(2):
        engine.step(torch.ones(4, 64), torch.ones(4, 64))
        kept.append(engine._heap.keeps)
    output = engine.model(torch.ones(4, 64))  # a loop of one's own counts its steps, too
    engine.backward(loss(output, torch.ones(4, 64)))
    engine.optimizer.step()
    assert engine._heap._calls == 3
    engine.evaluate(torch.ones(4, 64), torch.ones(4, 64))
    engine.predict(torch.ones(4, 64))
    assert engine._heap._calls == 5
    return kept


def test_engines_look_at_the_memory(ranks):
    assert ranks(2, _steps, ts.Plan(zero=0)) == [[True, True]] * 2


# Activations of 1 MiB are freed in another order than gradients, so that a heap has holes.
_HOLES = """
import torch, tensorshard as ts
from functools import partial
from torch import nn
from tensorshard.host import heap as host_heap
from tensorshard.host.memory import held_memory

host_heap._ROOM = {room}
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(24)))
engine = ts.parallelize(model, ts.Plan(zero=0), optimizer=partial(torch.optim.AdamW, lr=1e-3),
                        loss_fn=nn.functional.mse_loss, device="cpu")
batch = torch.ones(512, 512)
for _ in range(4):
    engine.step(batch, batch)
print(held_memory().now >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and glibc's allocator")
def test_what_is_given_back_is_not_held_between_steps():
    """24 MiB of weights and 48 of states are held; activations and gradients are not, unless the heap keeps them."""
    held = {}
    for name, room in (("kept", 0.0), ("given back", 1e9)):
        script = _HOLES.format(room=room)
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        held[name] = int(run.stdout)
    assert held["kept"] - held["given back"] > 30
