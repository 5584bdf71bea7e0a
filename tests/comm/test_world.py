"""How a process joins a world, with which device and timeouts, and how it leaves."""

import logging
import os
import socket
import subprocess
import sys
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tensorshard as ts
from tensorshard.comm import world
from tensorshard.comm.world import DEFAULT_TIMEOUT, LONG_TIMEOUT, default_device, flight_recorder, join_world
from tensorshard.parallelize.checks import as_device
from tensorshard.torch_private.process_groups import group_timeout

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    """A machine that shows so many GPUs to a process of a local rank, which has chosen one of them."""

    def show(count: int, local_rank: int, chosen: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return show


@pytest.mark.parametrize(("count", "local_rank", "index"), [(8, 3, 3), (1, 3, 0), (2, 5, 1)])
def test_each_local_rank_has_its_gpu_of_those_it_sees(gpus, count, local_rank, index):
    gpus(count, local_rank)
    assert default_device() == torch.device("cuda", index)


def test_cuda_without_an_index_is_the_gpu_of_the_local_rank(gpus):
    gpus(8, 3)
    assert as_device("cuda") == torch.device("cuda", 3)
    assert as_device("cuda:0") == torch.device("cuda", 0)
    gpus(8, 3, chosen=5)
    assert as_device("cuda") == torch.device("cuda", 5)
    gpus(1, 3)
    assert as_device("cuda") == torch.device("cuda", 0)


def _joined(monkeypatch) -> dict[str, str]:
    """The environment when the world is made, of a process on a GPU."""
    seen: dict[str, str] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(world, "leave_at_exit", lambda: None)
    monkeypatch.setattr(world, "_joined_here", weakref.WeakSet())
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.update(os.environ))
    join_world(torch.device("cuda", 0))
    return seen


def test_nccl_records_its_collectives_from_the_first_on(monkeypatch):
    for name in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with mock.patch.dict(os.environ):
        seen = _joined(monkeypatch)
        assert (seen["TORCH_NCCL_TRACE_BUFFER_SIZE"], seen["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("2000", "1")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert flight_recorder() == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    with mock.patch.dict(os.environ):
        assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in _joined(monkeypatch)


@pytest.mark.parametrize(
    ("address", "local_size", "interface", "warns"),
    [
        ("127.0.1.1", "2", None, True), ("10.0.0.7", "2", None, False), ("127.0.1.1", "4", None, False),
        ("127.0.1.1", "2", "eth0", False),
    ],
)  # fmt: skip
def test_a_name_that_leads_back_here_is_told_where_there_are_other_machines(
    monkeypatch, caplog, address, local_size, interface, warns
):
    monkeypatch.setattr(socket, "gethostbyname", lambda _: address)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    values = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": local_size, "GLOO_SOCKET_IFNAME": interface}
    for name, value in values.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "tensorshard"):
        world._warn_of_loopback()
    assert ("GLOO_SOCKET_IFNAME" in caplog.text and "127.0.1.1" in caplog.text) == warns


LEAVES = """
import atexit, sys, torch.distributed as dist
import torch
from tensorshard.comm.world import join_world, leave_at_exit
atexit.register(lambda: print(dist.is_initialized()))
if sys.argv[1] == "own":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
join_world(torch.device("cpu"))
leave_at_exit()  # as where there are GPUs
if sys.argv[1] == "fails":
    raise ValueError
"""


@pytest.mark.slow_cases("own", "fails")
@pytest.mark.parametrize("how", ["ends", "own", "fails"])
def test_a_process_leaves_the_groups_it_made_unless_it_failed(how):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, how], check=False, capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == str(how != "ends"), done.stderr


# -- timeouts --


def _engine(**options) -> ts.Engine:
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    build = partial(torch.nn.Linear, 8, 8)
    return ts.parallelize(
        build, ts.Plan(dp_replicate=2), optimizer=adamw, loss_fn=torch.nn.functional.mse_loss, **options
    )


def _step(engine: ts.Engine) -> None:
    engine.step(torch.ones(4, 8), torch.ones(4, 8))


def _timeouts(folder: str, given: float | None) -> list[timedelta]:
    """Of a group that parallelize makes: before the first step, after it, in a save, and after that."""
    engine = _engine(**({} if given is None else {"timeout": given}))
    found = [group_timeout(engine.mesh.group("dp_shard"), CPU)]
    _step(engine)
    found.append(group_timeout(engine.mesh.group("dp_shard"), CPU))
    save = type(engine._checkpoints()).save

    def saved(*args, **options):
        found.append(group_timeout(engine.mesh.group("dp_shard"), CPU))
        return save(*args, **options)

    with mock.patch.object(type(engine._checkpoints()), "save", saved):
        engine.save(str(Path(folder) / "saved"))
    return [*found, group_timeout(engine.mesh.group("dp_shard"), CPU)]


def test_ranks_wait_longer_for_a_first_step_and_a_save(ranks, tmp_path):
    expected = [LONG_TIMEOUT, DEFAULT_TIMEOUT, LONG_TIMEOUT, DEFAULT_TIMEOUT]
    assert ranks(4, _timeouts, str(tmp_path), None)[0] == expected


@pytest.mark.slow
def test_a_timeout_that_is_given_holds_always(ranks, tmp_path):
    assert ranks(4, _timeouts, str(tmp_path), 77)[0] == [timedelta(seconds=77)] * 4


def _timeouts_of_world() -> list[timedelta]:
    dist.destroy_process_group()
    engine = ts.parallelize(
        partial(torch.nn.Linear, 8, 8),
        ts.Plan(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=torch.nn.functional.mse_loss,
    )
    found = [group_timeout(dist.group.WORLD, CPU)]
    _step(engine)
    return [*found, group_timeout(dist.group.WORLD, CPU)]


def test_so_they_do_in_a_world_that_is_joined_here(ranks):
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    assert ranks(1, _timeouts_of_world, environment=variables)[0] == [LONG_TIMEOUT, DEFAULT_TIMEOUT]


_FORKS_AFTER_A_WORLD = """
import torch
import torch.distributed as dist

import tensorshard as ts
from tensorshard.comm.world import join_world


def on_rank() -> int:
    join_world(torch.device("cpu"))
    return dist.get_rank()


join_world(torch.device("cpu"))
dist.destroy_process_group()
print(ts.notebook_launch(on_rank, ranks=2))
"""


def test_ranks_forked_after_a_world_has_ended_join_their_own(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_FORKS_AFTER_A_WORLD)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[0, 1]"), done.stderr
