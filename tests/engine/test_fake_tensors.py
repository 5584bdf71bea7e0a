"""One rank of 64 on fake tensors and the fake process group: whole steps without memory, arithmetic or other ranks."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import parity
import tensorshard as ts
from toys import Regular, squares

WORLD = 64
RANK = 5


def _step(
    model: Any,
    loss_fn: Any,
    inputs: tuple[int, ...],
    targets: tuple[int, ...],
    dtype: torch.dtype,
    fields: dict[str, Any],
) -> dict[str, Any]:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    with FakeTensorMode():
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        engine = ts.parallelize(model, ts.Plan(**fields), optimizer=optimizer, loss_fn=loss_fn)
        tokens = dtype == torch.long and len(inputs) == 2
        batch = torch.zeros(inputs, dtype=torch.long if tokens else torch.float32), torch.zeros(targets, dtype=dtype)
        results = [engine.step(*batch), engine.evaluate(*batch)]
        states = [s for state in engine.optimizer.state.values() for s in state.values() if s.dim() > 0]
        tensors = [*results, *map(_local, engine.sharded.masters().values()), *map(_local, states)]
        assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
        assert engine.step_count == 1
        return {
            "held": engine.sharded.held_numel(),
            "states": sum(_local(s).numel() for s in states),
            "with_states": {name for name, p in engine.sharded.masters().items() if p in engine.optimizer.state},
            "mesh": engine.mesh.describe().splitlines()[2:4],
        }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gpt(fields: dict[str, Any]) -> dict[str, Any]:
    return _step(partial(parity.build, "gpt"), parity.loss_function("gpt"), (4, 12), (4, 12), torch.long, fields)


NUMEL = sum(p.numel() for p in parity.build("gpt").parameters())


@pytest.mark.parametrize(
    "level",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
    ],
)
def test_a_step_at_64_ranks(ranks, level):
    found = ranks(1, _gpt, dict(zero=level, precision="bf16", recompute="full"))[0]
    assert found["mesh"][1].split() == ["dp_shard", "degree", "64", "index", "5", "ranks", "0-63"]
    assert found["held"] < NUMEL / 10 if level == 3 else found["held"] >= NUMEL
    assert found["states"] < 2 * NUMEL / 10 if level > 0 else found["states"] == 2 * NUMEL


@pytest.mark.slow
@pytest.mark.parametrize(("level", "schedule"), [(1, "1f1b"), (3, "zbv")])
def test_a_step_of_a_pipeline_at_64_ranks(ranks, level, schedule):
    fields = dict(pp=2, tp=2, zero=level, micro_batches=4, pp_schedule=schedule, clip_grad_norm=1.0)
    found = ranks(1, _gpt, fields)[0]
    assert found["mesh"][1].split()[:7] == ["dp_shard", "degree", "16", "index", "2", "ranks", "1"]
    assert found["held"] < NUMEL / 2
    assert found["with_states"]


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_hybrid_step_at_8_times_8_ranks(ranks, level):
    fields = dict(dp_replicate=8, zero=level, micro_batches=2, clip_grad_norm=1.0, recompute="selective")
    found = ranks(1, _gpt, fields)[0]
    assert found["mesh"][0].split()[:7] == ["dp_replicate", "degree", "8", "index", "0", "ranks", "5"]
    assert found["mesh"][1].split("ranks ")[1] == "0 1 2 3 4 5 6 7"
    assert found["held"] < NUMEL / 6 if level == 3 else found["held"] >= NUMEL


@pytest.mark.parametrize("level", [0, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_batch_normalization_and_fp16(ranks, level):
    build, loss_fn = partial(parity.build, "resnet"), parity.loss_function("resnet")
    found = ranks(1, _step, build, loss_fn, (2, 3, 16, 16), (2,), torch.long, dict(zero=level, precision="fp16"))
    assert found[0]["held"] > 0


def _odd(fields: dict[str, Any]) -> dict[str, Any]:
    return _step(Regular, squares, (4, 6), (4, 3), torch.float32, fields)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_what_has_no_gradient_takes_no_states(ranks, level):
    with_states = ranks(1, _odd, dict(zero=level))[0]["with_states"]
    model = Regular()
    squares(model(torch.zeros(4, 6)), torch.zeros(4, 3)).backward()
    assert with_states == {name for name, p in model.named_parameters() if p.grad is not None}


def _meta_step(level: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 128), nn.Linear(128, 3))
    return _step(model, squares, (4, 6), (4, 3), torch.float32, dict(zero=level))


@pytest.mark.parametrize("level", [1, 3])
def test_a_meta_module(ranks, level):
    found = ranks(1, _meta_step, level)[0]
    assert found["with_states"] == {"0.weight", "0.bias", "1.weight", "1.bias"}
