"""Functions on several ranks from a running interpreter: what comes back, what is shown, and that nothing hangs."""

import multiprocessing
import os
import signal
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tensorshard as ts
from tensorshard.comm.world import join_world
from tensorshard.torch_private.process_groups import fake_world
from tensorshard.trainer.launch import notebook
from tensorshard.trainer.launch.launch_errors import RankFailedError

_FOR_EVER = 100.0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = {process.pid for process in multiprocessing.active_children()}
    yield
    assert {process.pid for process in multiprocessing.active_children()} <= before


def _wait_for_others() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))


def test_a_step_on_two_ranks() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    inputs = torch.arange(16.0).view(4, 4)
    targets = inputs.sum(dim=1, keepdim=True)
    expected = float(nn.functional.mse_loss(model(inputs), targets).detach())  # the forks follow a use of torch here

    def step(scale: float) -> dict[str, Any]:
        optimizer = partial(torch.optim.SGD, lr=1e-3)
        engine = ts.parallelize(model, ts.Plan(zero=3), optimizer=optimizer, loss_fn=nn.functional.mse_loss)
        share = slice(2 * engine.mesh.rank, 2 * engine.mesh.rank + 2)
        loss = engine.step(inputs[share], targets[share])
        return {"loss": scale * loss, "rank": engine.mesh.rank, "local": os.environ["LOCAL_RANK"]}

    weights = model[0].weight.clone()
    found = ts.notebook_launch(step, ranks=2, args=(2.0,))
    assert [(one["rank"], one["local"]) for one in found] == [(0, "0"), (1, "1")]
    assert [float(one["loss"]) for one in found] == pytest.approx([2 * expected] * 2)
    assert torch.equal(model[0].weight, weights) and not dist.is_initialized() and "RANK" not in os.environ


def test_what_ranks_print_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def say() -> None:
        print("one\ntwo")
        print("no end", end="", file=sys.stderr)

    assert ts.notebook_launch(say, ranks=2) == [None, None]
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == ["one", "rank 1: one", "rank 1: two", "two"]
    assert sorted(printed.err.splitlines()) == ["no end", "rank 1: no end"]


def test_the_first_error_is_told_with_its_traceback() -> None:
    def fail_in_rank_1() -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("the culprit")
        dist.all_reduce(torch.zeros(1))

    with pytest.raises(RankFailedError, match=r"^rank 1 of 2 failed:\n\nTraceback") as error:
        ts.notebook_launch(fail_in_rank_1, ranks=2)
    said = str(error.value)
    assert said.endswith("ValueError: the culprit") and said.count("Traceback") == 1
    assert 'raise ValueError("the culprit")' in said and "forked_rank" not in said


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 of 2 was killed by SIGKILL, most often the kernel's"),
        (lambda: os._exit(3), "rank 1 of 2 ended with exit code 3 and no Python exception"),
        (lambda: sys.exit(4), "rank 1 of 2 failed:(.|\n)*SystemExit: 4"),
    ],
)
def test_a_rank_that_ends_otherwise_ends_the_others(how: Any, said: str) -> None:
    def end_in_rank_1() -> None:
        if os.environ["RANK"] == "1":
            how()
        time.sleep(_FOR_EVER)

    with pytest.raises(RankFailedError, match=said):
        ts.notebook_launch(end_in_rank_1, ranks=2, timeout=60)


def test_who_waits_for_a_rank_that_has_returned_does_not_hang() -> None:
    with pytest.raises(RankFailedError, match="rank 0 of 2 failed"):
        ts.notebook_launch(_wait_for_others, ranks=2, timeout=60)


def test_a_limit_of_time_says_where_each_rank_was() -> None:
    def sleep_in_rank_1() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(_FOR_EVER)

    with pytest.raises(TimeoutError, match=r"timeout=1\.5 seconds") as error:
        ts.notebook_launch(sleep_in_rank_1, ranks=2, timeout=1.5)
    assert "rank 0 has returned" in str(error.value) and "in sleep_in_rank_1" in str(error.value)


def test_an_interrupt_ends_the_ranks() -> None:
    parent = os.getpid()

    def interrupt() -> None:
        dist.init_process_group("gloo")
        dist.barrier()  # all of them are there: the process that is interrupted forks no more
        if os.environ["RANK"] == "0":
            os.kill(parent, signal.SIGINT)
        time.sleep(_FOR_EVER)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells take from what they do meanwhile
    try:
        with pytest.raises(KeyboardInterrupt):
            ts.notebook_launch(interrupt, ranks=2, timeout=60)
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_cannot_be_sent_back_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"returned a function, which cannot be sent back .* return numbers"):
        ts.notebook_launch(lambda: lambda: None, ranks=1)


def test_a_process_that_is_in_a_world_of_its_own_may_launch() -> None:
    def size() -> int:
        dist.init_process_group("gloo")
        dist.barrier()  # a rank that ends at once takes its connection away while the other still opens it
        return dist.get_world_size()

    join_world(torch.device("cpu"))
    try:
        assert ts.notebook_launch(size, ranks=2) == [2, 2] and dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def _place_of_zeros() -> int:
    """Where torch takes a tensor to be that it makes like one of this rank's."""
    mesh = init_device_mesh("cpu", (2,))
    part = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False)
    found = torch.zeros_like(part)
    coordinate = found.device_mesh.get_coordinate()
    assert coordinate is not None
    return coordinate[0]


def test_ranks_have_their_own_places_after_a_simulated_world() -> None:
    with fake_world(1, 2):
        assert _place_of_zeros() == 1
    with fake_world(0, 2):
        assert _place_of_zeros() == 0
    assert ts.notebook_launch(_place_of_zeros, ranks=2) == [0, 1]


def test_a_rank_may_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="called in rank 0 of a world that a launcher started; call print there"):
        ts.notebook_launch(print)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"function": 3}, TypeError, "function is an int; it must be a function"),
        ({"ranks": "2"}, TypeError, "ranks is '2'; it must be a number of processes"),
        ({"ranks": 0}, ValueError, "ranks is 0; at least 1 process"),
        ({"args": (1,)}, TypeError, r"<lambda> takes \(\), and is called with args=\(1,\) \(too many"),
        ({"args": 1}, TypeError, r"args is 1; it must be the function's arguments, such as \(1,\)"),
        ({"timeout": 0}, ValueError, "timeout is 0; it must be a number of seconds above 0"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ts.notebook_launch(**{"function": lambda: None, **arguments})


def test_gpus_are_counted_and_must_be_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "visible_gpus", lambda: 1)
    with pytest.raises(ValueError, match="ranks is 2, but 1 GPU is visible and each rank takes one; ask for at most 1"):
        ts.notebook_launch(lambda: None, ranks=2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="has used a GPU, and its forks cannot; restart the kernel"):
        ts.notebook_launch(lambda: None, ranks=1)
