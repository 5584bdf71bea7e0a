"""Paddle's entry points: the caller's own loop, sharded at three levels; scaling, saving, groups."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import parity
import tensorshard as ts
from toys import Regular, data, squares

LEVELS = ["os", "os_g", "p_g_os"]


def _optimizer(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim <= 1]},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, eps=1e-3, **options)


def _group() -> tuple[Any, int, int]:
    """Two halves of the world: this rank's, its place in it, and which of the two it is."""
    size = dist.get_world_size() // 2
    half, index = divmod(dist.get_rank(), size)
    halves = [dist.new_group(list(range(h * size, (h + 1) * size))) for h in range(2)]
    return halves[half], index, half


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, first: int = 0) -> None:
    for step in range(first, first + 3):
        for inputs, targets in zip(*(t.chunk(2) for t in data(step)), strict=True):  # two backwards a step
            squares(model(inputs.chunk(size)[rank]), targets.chunk(size)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _sharded(level: str, options: dict[str, Any], segment_size: int | None, output: str) -> dict[str, Any]:
    model = Regular()
    if dist.get_rank() > 0:
        nn.init.zeros_(model.wide.weight)  # the first rank's weights count
    optimizer = _optimizer(model, **options)
    again = ts.group_sharded_parallel(model, optimizer, level, segment_size=segment_size)
    assert again == (model, optimizer, None)
    _train(model, optimizer, dist.get_rank(), dist.get_world_size())
    states = [s for state in optimizer.state.values() for s in state.values()]
    ts.save_group_sharded_model(model, output, optimizer)
    return {
        "held": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()),
        "states": sum((s.to_local() if isinstance(s, DTensor) else s).numel() for s in states),
    }


@pytest.mark.slow_cases("options0-None", "os", "os_g")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("options", "segment_size"), [({}, None), ({"fused": True}, 1 << 10)])
def test_the_callers_loop_trains_as_on_one_process(ranks, tmp_path, level, options, segment_size):
    sharded = ranks(4, _sharded, level, options, segment_size, str(tmp_path / "out"))
    model = Regular()
    optimizer = _optimizer(model)
    _train(model, optimizer, 0, 1)
    state = torch.load(tmp_path / "out" / "model.pt")
    state["calls"] = model.calls
    parity.assert_same_state(state, model.state_dict(), 1e-5)
    states = sum(s.numel() for state in optimizer.state.values() for s in state.values())
    assert all(rank["states"] < 0.3 * states for rank in sharded)

    saved = torch.load(tmp_path / "out" / "optimizer.pt")
    names = {p: n for n, p in model.named_parameters()}
    assert [group["params"] for group in saved["param_groups"]] == [
        [names[p] for p in group["params"]] for group in optimizer.param_groups
    ]
    assert saved["param_groups"][0]["weight_decay"] == 0.3
    assert set(saved["state"]) == {names[p] for p in optimizer.state}
    for parameter, values in optimizer.state.items():
        parity.assert_same_state(saved["state"][names[parameter]], values, 1e-5)


def _trained(level: str, offload: bool) -> list[torch.Tensor]:
    model = Regular()
    optimizer = _optimizer(model)
    ts.group_sharded_parallel(model, optimizer, level, offload=offload)
    _train(model, optimizer, dist.get_rank(), dist.get_world_size())
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_offload_trains_the_same_to_the_last_bit(ranks, level):
    plain, offloaded = (ranks(2, _trained, level, offload) for offload in (False, True))
    for expected, found in zip(plain, offloaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _scaled(level: str, fused: bool) -> list[Any]:
    model = Regular()
    optimizer = _optimizer(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, scaler = ts.group_sharded_parallel(model, optimizer, level, scaler)
    rank, size = dist.get_rank(), dist.get_world_size()
    changes = []
    for step in range(3):
        before = [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]
        inputs, targets = (t.chunk(size)[rank] for t in data(step))
        loss = squares(model(inputs), targets)
        if step == 1 and rank == 1:  # in the loss of one rank, in a part that the other updates
            loss = loss + model.wide.weight[0, 0] * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        changes.append((not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), scaler.get_scale()))
    return changes


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, level, fused):
    for changes in ranks(2, _scaled, level, fused):
        assert changes == [(True, 1024.0), (False, 512.0), (True, 512.0)]


def _in_halves(level: str, folder: str) -> tuple[str, bool]:
    group, index, half = _group()
    model = Regular()
    if index > 0:
        nn.init.zeros_(model.wide.weight)
    optimizer = _optimizer(model)
    ts.group_sharded_parallel(model, optimizer, level, group=group)
    _train(model, optimizer, index, group.size(), first=10 * half)  # each half with data of its own
    if half == 1:  # one group alone may save
        ts.save_group_sharded_model(model, f"{folder}/alone")
    ts.save_group_sharded_model(model, f"{folder}/half{half}")
    try:
        ts.save_group_sharded_model(model, f"{folder}/half{half}")
    except FileExistsError as error:
        return str(error), True
    return "", False


@pytest.mark.fast_cases("os")
@pytest.mark.parametrize("level", LEVELS)
def test_two_groups_train_two_models(ranks, tmp_path, level):
    for message, refused in ranks(4, _in_halves, level, str(tmp_path)):
        assert refused and "model.pt would be overwritten; nothing was written" in message
    for half in range(2):
        model = Regular()
        _train(model, _optimizer(model), 0, 1, first=10 * half)
        state = torch.load(tmp_path / f"half{half}" / "model.pt")
        state["calls"] = model.calls
        parity.assert_same_state(state, model.state_dict(), 1e-5)
    assert (tmp_path / "alone" / "model.pt").is_file()
    assert not list(tmp_path.rglob(".*"))


def _printed(folder: str) -> str:
    import contextlib
    import io

    group, _, _ = _group()
    model = Regular()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ts.group_sharded_parallel(model, _optimizer(model), "os_g", group=group)
    return printed.getvalue()


def test_the_groups_are_listed_at_the_start(ranks, tmp_path):
    printed = ranks(4, _printed, str(tmp_path))
    assert [bool(text) for text in printed] == [True, False, True, False]
    lines = printed[2].splitlines()
    assert lines[0] == "rank 2 of 4"
    assert [line.split() for line in lines if line.startswith("dp_shard")] == [
        ["dp_shard", "degree", "2", "index", "0", "ranks", "2", "3"]
    ]


def _only_the_optimizer_exists(folder: str) -> tuple[str, list[str]]:
    model = Regular()
    optimizer = _optimizer(model)
    ts.group_sharded_parallel(model, optimizer, "os")
    if dist.get_rank() == 0:
        Path(folder, "optimizer.pt").touch()
    dist.barrier()
    try:
        ts.save_group_sharded_model(model, folder, optimizer)
    except FileExistsError as error:
        return str(error), sorted(p.name for p in Path(folder).iterdir())
    return "", []


def test_saving_overwrites_no_part(ranks, tmp_path):
    for message, files in ranks(2, _only_the_optimizer_exists, str(tmp_path)):
        assert "optimizer.pt would be overwritten" in message
        assert files == ["optimizer.pt"]


def _overwritten(folder: str) -> list[tuple[list[str], int]]:
    model = Regular()
    optimizer = _optimizer(model)
    ts.group_sharded_parallel(model, optimizer, "os")
    ts.save_group_sharded_model(model, folder, optimizer)
    if dist.get_rank() == 0:
        Path(folder, "notes.txt").touch()
    found = []
    for kept in (optimizer, None):
        _train(model, optimizer, dist.get_rank(), 2, first=len(found))
        ts.save_group_sharded_model(model, folder, kept, overwrite=True)
        calls = torch.load(Path(folder, "model.pt"))["calls"]
        found.append((sorted(path.name for path in Path(folder).iterdir()), int(calls) - int(model.calls)))
        dist.barrier()
    return found


def test_saving_replaces_older_files_where_it_is_asked_to(ranks, tmp_path):
    for found in ranks(2, _overwritten, str(tmp_path / "out")):
        assert found == [(["model.pt", "notes.txt", "optimizer.pt"], 0), (["model.pt", "notes.txt"], 0)]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _stepped() -> dict[str, Any]:
    model = Regular()
    optimizer = _optimizer(model)
    _train(model, optimizer, 0, 1)
    return dict(model=model, optimizer=optimizer)


def _of_another_model() -> dict[str, Any]:
    return dict(optimizer=_optimizer(Regular()))


def _no_gradients() -> dict[str, Any]:
    model = Regular().requires_grad_(False)
    return dict(model=model, optimizer=_optimizer(model))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (dict(level="p_g"), ValueError, "level is 'p_g'; it must be one of 'os', 'os_g', 'p_g_os'"),
        (dict(offload="disk"), TypeError, "offload is 'disk'; it must be True or False"),
        (dict(model=Regular), TypeError, "model is a type; it must be a built nn.Module"),
        (dict(optimizer=torch.optim.SGD), TypeError, "optimizer is a type; it must be a torch Optimizer"),
        (dict(segment_size=0), ValueError, "segment_size is 0; it must be a number of bytes, at least 1"),
        (_stepped, ValueError, "the optimizer has already stepped"),
        (_of_another_model, ValueError, "holds a parameter of shape .* that is not the model's"),
        (_no_gradients, ValueError, "no parameter of the model requires a gradient"),
    ],
)
def test_refused_before_anything_is_allocated(changed, error, message):
    model = Regular()
    arguments = dict(model=model, optimizer=_optimizer(model), level="os")
    arguments.update(changed() if callable(changed) else changed)
    with pytest.raises(error, match=message):
        ts.group_sharded_parallel(**arguments)
    assert not dist.is_initialized()
    assert not any(p.is_meta for p in model.parameters())


def test_a_model_of_someone_else_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="did not come from group_sharded_parallel"):
        ts.save_group_sharded_model(Regular(), tmp_path)


def _twice_and_outside() -> list[str]:
    messages = []
    model = Regular()
    optimizer = _optimizer(model)
    ts.group_sharded_parallel(model, optimizer, "os")
    group = dist.new_group([0])
    attempts = [partial(ts.group_sharded_parallel, model, optimizer, "os")]
    if dist.get_rank() == 1:
        other = Regular()
        attempts.append(partial(ts.group_sharded_parallel, other, _optimizer(other), "os", group=group))
    for attempt in attempts:
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_model_is_sharded_once_and_by_members_of_the_group(ranks):
    outside = ranks(2, _twice_and_outside)[1]
    assert "a model can be laid out only once" in outside[0]
    assert "this process is not in the group" in outside[1]


def _parallel_mlp(split: bool) -> nn.Module:
    torch.manual_seed(0)
    if not split:
        return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Identity(), nn.Linear(10, 6), nn.LayerNorm(6))
    up, down = ts.nn.ParallelLinear(6, 10, dim=1), ts.nn.ParallelLinear(10, 6, dim=0)
    return nn.Sequential(up, nn.GELU(), ts.nn.RegisterParallelDim(-1), down, nn.LayerNorm(6))


def _train_mlp(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, parts: int) -> None:
    for step in range(2):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        model(x.chunk(parts)[index]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _sharded_beside_parallel_layers(level: str, output: str) -> None:
    ts.init_process_group(2)
    model = _parallel_mlp(split=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    ts.group_sharded_parallel(model, optimizer, level, group=ts.distributed.get_data_parallel_group())
    _train_mlp(model, optimizer, ts.distributed.get_data_parallel_rank(), 2)
    ts.save_group_sharded_model(model, output, optimizer)


@pytest.mark.parametrize("level", [pytest.param("os", marks=pytest.mark.slow), "p_g_os"])
def test_beside_parallel_layers(ranks, tmp_path, level):
    """Each rank shards its own parts over the ranks that hold the same ones; what is saved is whole."""
    ranks(4, _sharded_beside_parallel_layers, level, str(tmp_path / "saved"))
    whole = _parallel_mlp(split=False)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-3)
    _train_mlp(whole, optimizer, 0, 1)
    saved = torch.load(tmp_path / "saved" / "model.pt", weights_only=True)
    parity.assert_same_state(saved, whole.state_dict(), 1e-5)
    states = torch.load(tmp_path / "saved" / "optimizer.pt", weights_only=True)["state"]
    assert states["0.weight"]["exp_avg"].shape == (10, 6) and states["3.bias"]["exp_avg"].shape == (6,)
