"""Collecting and relocating state, and living under DistributedDataParallel."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import tensorshard.compat.state as state_module
import tensorshard.distributed as tsd
from rank_pool import RankError
from tensorshard.comm.marks import ParallelMark, get_parallel_dim, register_parallel_dim
from tensorshard.compat.state import collect_state_dict, relocate_state_dict, sharded_state_dict, slice
from tensorshard.nn import ParallelEmbedding, ParallelLinear, ParallelModule


class _Net(nn.Module):
    """An uneven model with a bit of everything; `reference` gives the one that is not parallel."""

    def __init__(self, reference: bool = False) -> None:
        super().__init__()
        embedding, linear = (nn.Embedding, nn.Linear) if reference else (ParallelEmbedding, ParallelLinear)
        dims = ({}, {}, {}) if reference else ({"dim": 0}, {"dim": 1}, {"dim": 0})
        double = {"dtype": torch.float64}
        self.embed = embedding(11, 5, **dims[0], **double)
        self.up = linear(5, 7, **dims[1], **double)
        self.norm = nn.BatchNorm1d(5, **double)
        self.down = linear(7, 5, **dims[2], **double)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(self.embed(indices))).relu())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        indices, targets = torch.randint(11, (6,)), torch.randn(6, 5)
        nn.functional.mse_loss(model(indices), targets.double()).backward()
        optimizer.step()


def _assert_states_match(found: dict, expected: dict) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def _save(group_size: int, path: str) -> None:
    tsd.init_process_group(group_size)
    torch.manual_seed(0)
    model = _Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    _train(model, optimizer, 3)
    state = {
        "model": collect_state_dict(model, model.state_dict(), rank0_only=True),
        "optimizer": collect_state_dict(optimizer, rank0_only=True),
    }
    assert bool(state["model"]) == bool(state["optimizer"]) == (tsd.get_rank() == 0)
    if dist.get_rank() == 0:
        assert all(type(value) is torch.Tensor for value in state["model"].values())
        torch.save(state, path)
    everywhere = collect_state_dict(model, rank0_only=False, prefix="net.")
    assert everywhere["net.up.weight"].shape == (7, 5)


def _load_and_train(group_size: int, path: str, how: str) -> dict:
    tsd.init_process_group(group_size)
    model = _Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if how == "one rank has it" and tsd.get_rank() != 0:
        saved = {"model": None, "optimizer": None}
    else:
        saved = torch.load(path, weights_only=True)
    if how == "straight":
        model.load_state_dict(saved["model"])
    else:
        model.load_state_dict(relocate_state_dict(model, saved["model"]))
    optimizer.load_state_dict(relocate_state_dict(optimizer, saved["optimizer"]))
    _train(model, optimizer, 2, start=3)
    return collect_state_dict(model, rank0_only=True)


@pytest.fixture(scope="module")
def reference() -> dict:
    torch.manual_seed(0)
    model = _Net(reference=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    _train(model, optimizer, 5)
    return model.state_dict()


@pytest.mark.parametrize(
    ("save", "load", "how"),
    [
        pytest.param((2, 2), (4, 4), "all ranks have it", marks=pytest.mark.slow),
        pytest.param((4, 4), (2, 2), "one rank has it", marks=pytest.mark.slow),
        ((4, 2), (1, 1), "straight"),
        ((1, 1), (4, 2), "one rank has it"),
    ],
)
def test_save_and_resume_on_other_groups(ranks, tmp_path, reference, save, load, how):
    path = str(tmp_path / "state.pt")
    ranks(save[0], _save, save[1], path)
    plain = _Net(reference=True)
    plain.load_state_dict(torch.load(path, weights_only=True)["model"])  # the original class reads it
    states = ranks(load[0], _load_and_train, load[1], path, how)
    _assert_states_match(states[0], reference)
    assert all(state == {} for rank, state in enumerate(states) if rank % load[1])


def _save_with_dcp(path: str) -> None:
    tsd.init_process_group(2)
    torch.manual_seed(3)
    dcp.save(sharded_state_dict(_Net()), checkpoint_id=path)


def _load_with_dcp(path: str) -> dict:
    tsd.init_process_group(4)
    model = _Net()
    state = sharded_state_dict(model)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    return collect_state_dict(model)


def test_torchs_own_checkpoints(ranks, tmp_path):
    ranks(2, _save_with_dcp, str(tmp_path))
    torch.manual_seed(3)
    _assert_states_match(ranks(4, _load_with_dcp, str(tmp_path))[0], _Net(reference=True).state_dict())


class _Scale(ParallelModule):
    """A layer of one's own."""

    def __init__(self, features: int) -> None:
        super().__init__(dim=0)
        self.features = features
        self.weight = self.split(torch.arange(float(features)), 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tsd.gather(tsd.scatter(x) * self.weight, size=self.features)


def _own_layers() -> None:
    tsd.init_process_group(2)
    layer = _Scale(5)
    assert layer(torch.ones(2, 5))[1].tolist() == [0, 1, 2, 3, 4]
    layer.load_state_dict({"weight": torch.full((5,), 2.0)})
    assert collect_state_dict(layer, rank0_only=False)["weight"].tolist() == [2.0] * 5
    # TorchShard's way: a plain parameter that is marked.
    marked = nn.Linear(4, 3, bias=False)
    marked.weight = nn.Parameter(tsd.scatter(torch.arange(20.0).view(5, 4), 0).clone())
    register_parallel_dim(marked.weight, 1)  # its layer splits the output features
    whole = collect_state_dict(marked, rank0_only=False)
    assert whole["weight"].shape == (5, 4)
    assert torch.equal(relocate_state_dict(marked, whole)["weight"], marked.weight)
    marked.register_buffer("scale", tsd.scatter(torch.arange(3.0), 0))
    whole = collect_state_dict(marked, rank0_only=False)
    assert whole["scale"].tolist() == [0, 1, 2]
    assert torch.equal(relocate_state_dict(marked, whole)["scale"], marked.scale)


def test_layers_of_ones_own(ranks):
    ranks(2, _own_layers)


def _ties() -> None:
    tsd.init_process_group(2)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    ParallelLinear.convert_parallel_linear(model, dim=1)
    state = collect_state_dict(model, rank0_only=False)
    assert state["a.weight"] is state["b.weight"] and state["a.bias"] is not state["b.bias"]
    assert bool(collect_state_dict(model, rank0_only=True)) == (dist.get_rank() == 0)


def test_ties_survive(ranks):
    ranks(2, _ties)


def _most_whole_tensors() -> int:
    """How many whole tensors exist at once while they are collected."""
    tsd.init_process_group(2)
    model = nn.Sequential(*(ParallelLinear(8, 8, dim=1) for _ in range(4)))
    seen, most = [], 0
    gather = state_module.gather_full

    def watched(tensor: torch.Tensor, layout: ParallelMark | None) -> torch.Tensor:
        nonlocal most
        deadline = time.monotonic() + (1.0 if tsd.get_rank() else 0.0)
        while any(not storage.expired() for storage in seen) and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread of Gloo may let go of what it sent a little later
        whole = gather(tensor, layout)
        seen.append(StorageWeakRef(whole.untyped_storage()))
        most = max(most, sum(not storage.expired() for storage in seen))
        return whole

    with mock.patch.object(state_module, "gather_full", watched):
        collected = collect_state_dict(model, rank0_only=True)
    assert len(collected) == (8 if tsd.get_rank() == 0 else 0)
    return most


def test_collecting_takes_one_tensor_at_a_time(ranks):
    assert ranks(2, _most_whole_tensors) == [8, 1]  # the first rank keeps them


def _bad_state(case: str) -> None:
    tsd.init_process_group(2)
    dist.barrier()
    layer = ParallelLinear(4, 6, dim=1)
    if case == "shape":
        relocate_state_dict(layer, {"weight": torch.ones(5, 4)})
    elif case == "momentum":
        state = {"state": {0: {"momentum_buffer": torch.ones(3, 3)}}, "param_groups": []}
        relocate_state_dict(torch.optim.SGD(layer.parameters(), lr=0.1), state)
    elif case == "none":
        relocate_state_dict(layer, None)
    elif case == "load":
        layer.load_state_dict({"weight": torch.ones(5, 4), "bias": torch.ones(6)})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("shape", r"weight: a tensor of shape \[5, 4\] was given where \[6, 4\] is held"),
        ("momentum", r"momentum_buffer of parameter 0: a tensor of shape \[3, 3\] was given where \[6, 4\] is held"),
        ("none", "the first rank of the group passed no state"),
        ("load", "size mismatch for weight"),
    ],
)
def test_bad_states(ranks, case, message):
    with pytest.raises(RankError, match=message):
        ranks(2, _bad_state, case)


def test_slice():
    x = torch.arange(10.0).view(2, 5)
    parts = slice(x, 3, dim=-1)
    assert [p.shape[1] for p in parts] == [2, 2, 1]
    assert not parts[0].is_contiguous() and slice(x, 3, contiguous=True)[0].is_contiguous()
    assert [len(p) for p in slice(x, 4, dim=0)] == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="num_partitions=0 was given: use at least 1"):
        slice(x, 0)
    with pytest.raises(IndexError, match="dim=2 was given for a tensor of 2 dimensions"):
        slice(x, 2, dim=2)


def test_marks():
    x = torch.ones(2, 3)
    assert get_parallel_dim(x) is None
    assert register_parallel_dim(x, -1) is x and get_parallel_dim(x) == -1
    register_parallel_dim(x, None)
    assert get_parallel_dim(x) is None
    with pytest.raises(IndexError, match="dim=2 was given for a tensor of 2 dimensions"):
        register_parallel_dim(x, 2)
