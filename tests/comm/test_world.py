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
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tensorshard as ts
from tensorshard.comm import world
from tensorshard.comm.world import DEFAULT_TIMEOUT, LONG_TIMEOUT, default_device, flight_recorder, join_world
from tensorshard.parallelize.checks import as_device
from tensorshard.plan import mesh
from tensorshard.torch_private.process_groups import (
    alone_in_the_world,
    backend_of_pipeline,
    group_timeout,
    opens_at_once,
)

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


def _joined(monkeypatch, options: dict[str, Any] | None = None) -> dict[str, str]:
    """The environment when the world is made, of a process on a GPU; `options` becomes what it is made with."""
    seen: dict[str, str] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(world, "leave_at_exit", lambda: None)
    monkeypatch.setattr(world, "_joined_here", weakref.WeakSet())

    def make(*_: Any, **given: Any) -> None:
        seen.update(os.environ)
        if options is not None:
            options.update(given)

    monkeypatch.setattr(dist, "init_process_group", make)
    join_world(torch.device("cuda", 3))
    return seen


@pytest.mark.parametrize("launched", [False, True])
def test_a_world_that_opens_at_once_is_told_its_gpu(monkeypatch, launched):
    """Else torch 2.15 takes the GPU of the local rank, whatever ``device=`` says."""
    for name in ("RANK", "WORLD_SIZE"):
        if launched:
            monkeypatch.setenv(name, "1")
        else:
            monkeypatch.delenv(name, raising=False)
    for at_once in (True, False):
        monkeypatch.setattr(world, "opens_at_once", lambda: at_once)  # noqa: B023
        options: dict[str, Any] = {}
        with mock.patch.dict(os.environ):
            _joined(monkeypatch, options)
        assert options.get("device_id") == (torch.device("cuda", 3) if at_once else None)


@pytest.mark.parametrize(
    ("version", "variable", "at_once"), [("2.14.1", "", False), ("2.15.0", "", True), ("2.15.0", "0", False)]
)
def test_groups_open_at_once_from_torch_2_15_on(monkeypatch, version, variable, at_once):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", variable)
    assert opens_at_once() == at_once


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


def _examined() -> tuple[list[bool], list[Any], int]:
    """What torch keeps of a group, from 2.14 and 2.15 on, while a model is examined and after it."""
    kept = dist.distributed_c10d._world
    if not hasattr(kept, "pg_flight_recorder_hooks"):
        kept.pg_flight_recorder_hooks = {}
    recorder, comm = object(), mock.Mock()
    kept.pg_flight_recorder_hooks[dist.group.WORLD] = recorder
    kept.comms.append(comm)
    with alone_in_the_world():
        during = [recorder in kept.pg_flight_recorder_hooks.values(), comm in kept.comms]
    after = [kept.pg_flight_recorder_hooks.pop(dist.group.WORLD, None) is recorder, comm in kept.comms]
    kept.comms.clear()
    return during, after, comm.finalize.call_count


def test_the_flight_recorder_lives_on_after_an_examination(ranks):
    assert ranks(2, _examined) == [([False, False], [True, True], 0)] * 2


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


@pytest.mark.slow
def test_ranks_forked_after_a_world_has_ended_join_their_own(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_FORKS_AFTER_A_WORLD)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[0, 1]"), done.stderr


# -- the group of a pipeline --


@pytest.mark.parametrize(
    ("config", "implementation", "backends"),
    [
        ("cpu:gloo,cuda:nccl", "nccl2", "cpu:gloo,cuda:nccl-lazy"),
        ("cuda:nccl", "nccl2", "cuda:nccl-lazy"),
        ("cpu:gloo,cuda:nccl", "nccl", None),  # has a communicator for each pair
        ("cpu:gloo,cuda:nccl-lazy", "nccl-lazy", None),
        ("cpu:gloo", "gloo", None),
    ],
)
def test_a_pipeline_has_a_stream_for_each_neighbour(monkeypatch, config, implementation, backends):
    group = mock.Mock()
    group._get_backend.return_value.name.return_value = implementation
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    assert backend_of_pipeline(group) == backends


@pytest.mark.parametrize(
    ("fields", "expected"), [(dict(pp=2, micro_batches=2), {"pp": "lazy", "dp_shard": None}), (dict(tp=2), None)]
)
def test_only_the_group_of_a_pipeline_is_made_so(ranks, fields, expected):
    assert ranks(2, _overrides, fields) == [expected] * 2


def _overrides(fields: dict[str, int]) -> dict[str, Any] | None:
    seen: dict[str, Any] = {}

    def make(*args: Any, mesh_dim_names: tuple[str, ...], backend_override: Any = None) -> DeviceMesh:
        if backend_override is not None:
            seen.update(zip(mesh_dim_names, (name for name, _ in backend_override), strict=True))
        return DeviceMesh(*args, mesh_dim_names=mesh_dim_names)

    with (
        mock.patch.object(mesh, "backend_of_pipeline", lambda _: "lazy"),
        mock.patch.object(mesh, "DeviceMesh", make),
    ):
        mesh.Mesh(ts.Plan(**fields), "cpu")
    return seen or None
