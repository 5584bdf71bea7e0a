"""What the TorchShard article prints, with `import tensorshard as ts`: its result is that of one device."""

import copy
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.utils.checkpoint import checkpoint

import tensorshard as ts
from rank_pool import RankError

_CLASSES = 7
_STEPS = 5


class _Net(nn.Module):
    """A backbone and a last layer; `parallel` is how the article changes its forward."""

    def __init__(self, parallel: bool, classes: int = _CLASSES) -> None:
        super().__init__()
        self.parallel = parallel
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x).relu().mean((2, 3)))
        if self.parallel:
            x = ts.distributed.gather(x, dim=0)
        return self.fc(x)


def _samples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 3, 5, 5, generator=generator), torch.randint(_CLASSES, (count,), generator=generator)


def _optimizer(parameters, zero: bool, **settings) -> torch.optim.Optimizer:
    """As the article's script makes it."""
    if zero:
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.SGD, **settings)
    return torch.optim.SGD(parameters, **settings)


_SGD = {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-3}


def _reference(world: int, *, clip: float | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = _Net(parallel=False)
    optimizer = torch.optim.SGD(model.parameters(), **_SGD)
    for step in range(_STEPS):
        images, targets = _samples(step, 3 * world)
        nn.functional.cross_entropy(model(images), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _converted(dim: int | None) -> nn.Module:
    torch.manual_seed(0)
    model = _Net(parallel=True)
    ts.nn.ParallelLinear.convert_parallel_linear(model, dim=dim)
    return model


def _train(model, optimizer, scaler, start: int, stop: int, *, clip: float | None = None) -> list[float]:
    """The article's loop: model, gathered targets, loss, scaler."""
    criterion = ts.nn.ParallelCrossEntropyLoss()
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(start, stop):
        images, targets = _samples(step, 3 * world)
        images, target = images[3 * rank : 3 * rank + 3], targets[3 * rank : 3 * rank + 3]
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            output = model(images)
            target = ts.distributed.gather(target, dim=0)
            loss = criterion(output, target)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm()
        assert error < tolerance, f"{name} is off by {error:.1e}"


def _as_printed(group_size: int, dim: int | None, zero: bool, clip: float | None, register: bool) -> None:
    ts.distributed.init_process_group(group_size=group_size)
    model = _converted(dim)
    if register:
        assert ts.register_ddp_parameters_to_ignore(model) == ([] if dim is None else ["fc.weight", "fc.bias"])
    model = DistributedDataParallel(model)
    optimizer = _optimizer(model.parameters(), zero, **_SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    _train(model, optimizer, scaler, 0, _STEPS, clip=clip)
    state = ts.collect_state_dict(model, rank0_only=False)
    state = {name.removeprefix("module."): value for name, value in state.items()}
    _assert_same(state, _reference(dist.get_world_size(), clip=clip))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize(("world", "group_size"), [(2, 2), (4, 4), (4, 2)])
def test_weights_are_those_of_one_device(ranks, world, group_size, dim, zero):
    clip = 0.3 if zero or dim == 0 else None
    ranks(world, _as_printed, group_size, dim, zero, clip, dim == 1)


def _bf16(zero: bool) -> list[float]:
    ts.init_process_group(group_size=2)
    model = DistributedDataParallel(_converted(-1))
    optimizer = _optimizer(model.parameters(), zero, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    criterion = ts.nn.ParallelCrossEntropyLoss()
    losses = []
    for _ in range(10):
        images, target = _samples(dist.get_rank(), 4)
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(model(images), ts.distributed.gather(target, dim=0))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_autocast_is_the_same_with_and_without_zero(ranks):
    plain, zero = ranks(2, _bf16, False), ranks(2, _bf16, True)
    assert plain[0] == plain[1] and zero[0] == zero[1]
    assert plain[0] == pytest.approx(zero[0], rel=1e-6)
    assert plain[0][-1] < plain[0][0]


class _Replicated(ts.nn.ParallelModule):
    """A replicated parameter before a split one: of the list that GradScaler hands on, the first is not split."""

    def __init__(self) -> None:
        super().__init__(0)
        self.scale = self.replicate(torch.ones(4, requires_grad=True))
        self.weight = self.split(torch.ones(4, requires_grad=True), 0)


def _overflow(zero: bool) -> None:
    ts.init_process_group(2)
    plain, layer = nn.Linear(2, 2), _Replicated()
    optimizer = _optimizer([*plain.parameters(), *layer.parameters()], zero, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflows in (False, True, False):
        loss = (plain(torch.ones(2)).sum() + (layer.weight.to_local() * 2).sum()) + layer.scale.to_local().sum()
        scaler.scale(loss).backward()
        if overflows and dist.get_rank() == 1:
            layer.weight.grad.to_local()[0] = torch.inf
        before = layer.weight.to_local().clone()
        scaler.step(optimizer)
        scaler.update()
        expected = before if overflows else before - 2  # unscaled: 16 / 8
        torch.testing.assert_close(layer.weight.to_local(), expected, rtol=0, atol=0)
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("zero", [False, True])
def test_one_ranks_overflow_is_everyones(ranks, zero):
    ranks(2, _overflow, zero)


def _norms() -> None:
    ts.init_process_group(2)
    for norm_type in (1.0, 2.0, torch.inf):
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
        split = copy.deepcopy(whole)
        ts.nn.ParallelLinear.convert_parallel_linear(split, 1, ["1"])
        x = torch.randn(4, 3)
        whole(x).square().sum().backward()
        ts.distributed.gather(split(x), -1).square().sum().backward()
        for foreach in (None, True):
            expected = nn.utils.clip_grad_norm_(whole.parameters(), 5.0, norm_type)
            found = nn.utils.clip_grad_norm_(split.parameters(), 5.0, norm_type, foreach=foreach)
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(split[1].weight.grad.full_tensor(), whole[1].weight.grad)
            torch.testing.assert_close(split[0].weight.grad, whole[0].weight.grad)
    split[1].bias.grad.to_local().fill_(torch.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(split.parameters(), 5.0, error_if_nonfinite=True)


def test_clip_grad_norm_of_a_mixture(ranks):
    ranks(2, _norms)


# --- ZeroRedundancyOptimizer ------------------------------------------------------------------------------------------


def _zero_save(group_size: int, optimizer_class, path: str) -> None:
    ts.init_process_group(group_size)
    model = DistributedDataParallel(_converted(1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.05)
    assert isinstance(optimizer, ZeroRedundancyOptimizer) and len(optimizer.param_groups[0]["params"]) == 6
    held = [len(local.state_dict()["param_groups"][0]["params"]) for local in (optimizer.optim, optimizer.split_optim)]
    assert held[0] < 4 and held[1] == 2  # some of the whole parameters, this rank's part of the split ones
    _train(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), 0, 3)
    if dist.get_rank() == 0:
        optimizer.consolidate_state_dict()
        consolidated = optimizer.state_dict()
    else:
        optimizer.consolidate_state_dict()
        with pytest.raises(RuntimeError, match="not been consolidated"):
            optimizer.state_dict()
    states = {"model": ts.collect_state_dict(model.module), "optimizer": ts.collect_state_dict(optimizer)}
    assert bool(states["optimizer"]) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert states["optimizer"]["state"].keys() == consolidated["state"].keys() == set(range(6))
        shapes = (
            [s["exp_avg"].shape for s in consolidated["state"].values()] if "exp_avg" in str(consolidated) else None
        )
        assert shapes is None or shapes[4] == (_CLASSES, 4)
        torch.save(states, path)


def _zero_resume(group_size: int, optimizer_class, path: str, zero: bool, how: str) -> dict[str, torch.Tensor]:
    ts.init_process_group(group_size)
    model = _converted(1)
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    model = DistributedDataParallel(model)
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.7)
    else:
        optimizer = optimizer_class(model.parameters(), lr=0.7)
    state = saved["optimizer"]
    if how == "relocated":
        state = ts.relocate_state_dict(optimizer, state if dist.get_rank() % group_size == 0 else None)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.05
    _train(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), 3, _STEPS)
    return ts.collect_state_dict(model.module, rank0_only=False)


def _adam_reference() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = _Net(parallel=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(_STEPS):
        images, targets = _samples(step, 6)
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("zero", "how"), [(True, "whole"), (True, "relocated"), (False, "relocated")])
def test_zero_saves_and_resumes(ranks, tmp_path, zero, how):
    path = str(tmp_path / "state.pt")
    ranks(2, _zero_save, 2, torch.optim.AdamW, path)
    plain = torch.optim.AdamW(_Net(parallel=False).parameters())
    plain.load_state_dict(torch.load(path, weights_only=True)["optimizer"])  # that of a model that is not parallel
    for state in ranks(2, _zero_resume, 2, torch.optim.AdamW, path, zero, how):
        _assert_same(state, _adam_reference())


def _zero_groups_and_buckets() -> None:
    ts.init_process_group(2)
    results = []
    for zero in (False, True):
        model = DistributedDataParallel(_converted(1))
        whole = [p for name, p in model.named_parameters() if "fc" not in name]
        groups = [{"params": whole, "lr": 0.1}, {"params": list(model.module.fc.parameters())[:1], "lr": 0.3}]
        if zero:
            optimizer = ZeroRedundancyOptimizer(groups, torch.optim.SGD, parameters_as_bucket_view=True, lr=9.0)
        else:
            optimizer = torch.optim.SGD(groups, lr=9.0)
        optimizer.add_param_group({"params": list(model.module.fc.parameters())[1:], "lr": 0.2})
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        _train(model, optimizer, scaler, 0, 2)
        for group in optimizer.param_groups:  # as a schedule would
            group["lr"] *= 0.5
        _train(model, optimizer, scaler, 2, 4)
        results.append(ts.collect_state_dict(model.module, rank0_only=False))
    _assert_same(results[1], results[0], tolerance=1e-7)


def test_zero_with_groups_schedules_and_buckets(ranks):
    ranks(2, _zero_groups_and_buckets)


def _zero_with_errors(what: str) -> None:
    ts.init_process_group(2)
    model = _converted(1)
    if what == "overlap":
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    state = optimizer.param_groups[0] | {"params": list(range(6))}
    optimizer.load_state_dict({"state": {4: {"momentum_buffer": torch.ones(3, 3)}}, "param_groups": [state]})


def test_zero_refuses(ranks):
    with pytest.raises(RankError, match="overlap_with_ddp=True was given for a model with split parameters"):
        ranks(2, _zero_with_errors, "overlap")
    with pytest.raises(
        RankError, match=r"momentum_buffer of parameter 4: a tensor of shape \[3, 3\] was given where \[7, 4\]"
    ):
        ranks(2, _zero_with_errors, "shape")


def _torch_is_left_as_it_was() -> None:
    def places():
        handlers = torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers
        return [
            ZeroRedundancyOptimizer.__init__,
            DistributedDataParallel.__init__,
            torch.optim.Optimizer.load_state_dict,
            clip_grad._get_total_norm,
            clip_grad._clip_grads_with_norm_,
            handlers[torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default],
        ]

    ts.distributed.destroy_process_group()  # what earlier tests left in this process
    before = places()
    assert all("tensorshard" not in place.__module__ for place in before)
    ts.init_process_group(2)
    assert all(now is not then for now, then in zip(places(), before, strict=True))
    plain = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    assert type(plain) is ZeroRedundancyOptimizer and not hasattr(plain, "split_optim")
    overlapping = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    assert overlapping._overlap_with_ddp
    ts.distributed.destroy_process_group()
    assert places() == before


def _torch_ends_the_world() -> None:
    ts.distributed.destroy_process_group()
    original = clip_grad._get_total_norm
    ts.init_process_group(2)
    ours = clip_grad._get_total_norm
    assert ours is not original
    dist.destroy_process_group()  # torch's: nobody tells us
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 3.0)
    assert nn.utils.clip_grad_norm_(parameter, 1.0) == 3.0
    assert clip_grad._get_total_norm is original
    assert ours([parameter.grad]) == parameter.grad  # who kept ours has torch's


def _somebody_wraps_in_turn() -> None:
    ts.distributed.destroy_process_group()
    original = clip_grad._get_total_norm
    ts.init_process_group(2)
    ours = clip_grad._get_total_norm

    def theirs(*args):
        return ours(*args)

    with mock.patch.object(clip_grad, "_get_total_norm", theirs):
        ts.distributed.destroy_process_group()
        assert clip_grad._get_total_norm is theirs
        assert theirs([torch.ones(4)]) == 2.0
    clip_grad._get_total_norm = original


def test_torch_is_left_as_it_was(ranks):
    ranks(2, _torch_is_left_as_it_was)
    ranks(2, _torch_ends_the_world)
    ranks(2, _somebody_wraps_in_turn)
    ranks(2, ts.init_process_group, 2)  # and leaves its world with the groups in it
    ranks(2, _torch_is_left_as_it_was)


# --- What is computed inside DistributedDataParallel ------------------------------------------------------------------


class _Roundtrip(nn.Module):
    """Gathers samples and scatters them again, with parameters before, between and after; or the other way round."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        x = first(x).tanh()
        if self.how == "own samples":
            x = ts.distributed.gather(x, dim=0)
            x = second(x).tanh()
            return third(ts.distributed.scatter(x, dim=0))
        if self.how == "same samples":
            x = ts.distributed.scatter(x, dim=0)
            x = second(x).tanh()
            return third(ts.distributed.gather(x, dim=0))
        # Features: gathered along another dimension, so that there is nothing to make up for.
        x = ts.distributed.gather(ts.distributed.scatter(x, dim=-1) * 2, dim=-1)
        return third(second(x).tanh())


def _roundtrip(how: str, group_size: int) -> None:
    ts.init_process_group(group_size)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = _Roundtrip(how)
    whole = copy.deepcopy(model)
    first, second, third = whole.layers
    factor = 2 if how == "features" else 1
    x = torch.randn(4 * world, 3)
    if how == "own samples":
        mine = x[4 * rank : 4 * rank + 4]
    else:
        mine = x.chunk(world // group_size)[rank // group_size]
    ddp = DistributedDataParallel(model)
    ddp(mine).square().mean().backward()
    third(second(first(x).tanh() * factor).tanh()).square().mean().backward()
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("how", ["own samples", "same samples", "features"])
@pytest.mark.parametrize(("world", "group_size"), [(2, 2), (4, 2)])
def test_gradients_through_gather_and_scatter(ranks, world, group_size, how):
    ranks(world, _roundtrip, how, group_size)


class _Gathering(nn.Module):
    def __init__(self, reentrant: bool | None = None, **options) -> None:
        super().__init__()
        self.reentrant, self.options = reentrant, options
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.reentrant is None:
            return self.gathered(x)
        return checkpoint(self.gathered, x, use_reentrant=self.reentrant)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(ts.distributed.gather(x.tanh(), dim=0, **self.options))


def _gradient(wrap: bool, reentrant: bool | None = None, group=None, **options) -> torch.Tensor:
    torch.manual_seed(0)
    model = _Gathering(reentrant, **options)
    call = DistributedDataParallel(model, process_group=group) if wrap else model
    call(torch.full((2, 3), 1.0 + dist.get_rank())).square().mean().backward()
    return model.body.weight.grad


def _scales() -> None:
    ts.init_process_group(2)
    automatic = _gradient(True)
    torch.testing.assert_close(_gradient(True, grad_scale=2.0), automatic)
    torch.testing.assert_close(_gradient(True, grad_scale=1.0), automatic / 2)  # what TorchShard computes
    torch.testing.assert_close(_gradient(True, False), automatic)
    torch.testing.assert_close(_gradient(True, True, grad_scale=2.0), automatic)
    alone = _gradient(False)  # nobody averages, so that this rank's part is what it is
    dist.all_reduce(alone)
    torch.testing.assert_close(alone, automatic)
    over_itself = _gradient(True, group=ts.distributed.get_data_parallel_group())
    torch.testing.assert_close(over_itself, _gradient(False))
    # A parameter that is put together inside the forward holds no samples.
    layer = ts.nn.ParallelLinear(3, 4, dim=1, bias=False)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.plain = layer, nn.Linear(3, 3)

        def forward(self, x):
            return nn.functional.linear(self.plain(x), ts.distributed.gather(self.layer.weight, dim=0))

    x = torch.ones(2, 3)
    model = Tied()
    DistributedDataParallel(model)(x).sum().backward()
    expected = model.plain(x).sum(0).expand(4, 3)
    torch.testing.assert_close(layer.weight.grad.full_tensor(), expected)
    _gradient(True, True)


def test_who_averages(ranks):
    with pytest.raises(RankError, match=r"being computed again by torch.utils.checkpoint with use_reentrant=True"):
        ranks(2, _scales)


class _CosineHead(nn.Module):
    """Puts a head's normalised weight together in forward: what is gathered there are no samples."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).tanh()
        if not self.parallel:
            return nn.functional.linear(x, nn.functional.normalize(self.head.weight))
        weight = nn.functional.normalize(self.head.weight.to_local())
        return nn.functional.linear(ts.distributed.gather(x, dim=0), ts.distributed.gather(weight, dim=0))


def _gathered_weights(group_size: int) -> None:
    ts.init_process_group(group_size)
    torch.manual_seed(0)
    model, whole = _CosineHead(True), _CosineHead(False)
    whole.load_state_dict(model.state_dict())
    ts.nn.ParallelLinear.convert_parallel_linear(model, 1, ["head"])
    x = torch.randn(2 * dist.get_world_size(), 3)
    ddp = DistributedDataParallel(model)
    ddp(x[2 * dist.get_rank() :][:2]).square().mean().backward()
    whole(x).square().mean().backward()
    torch.testing.assert_close(model.body.weight.grad, whole.body.weight.grad)
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), whole.head.weight.grad)


@pytest.mark.parametrize("world", [2, 4])
def test_weights_gathered_in_forward(ranks, world):
    ranks(world, _gathered_weights, 2)


def _accumulate(group_size: int) -> None:
    """Three backwards that DDP does not synchronize, and one of nothing that it does."""
    ts.init_process_group(group_size)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6))
    model = copy.deepcopy(whole)
    ts.nn.ParallelLinear.convert_parallel_linear(model, 0, ["1"])
    ddp = DistributedDataParallel(model)
    for x in torch.randn(3, 2 * ts.distributed.get_data_parallel_size(), 4):
        with ddp.no_sync():
            ddp(x[2 * ts.distributed.get_data_parallel_rank() :][:2]).square().mean().backward()
        whole(x).square().mean().backward()
    ddp(torch.zeros(1, 4)).mul(0).sum().backward()
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        gradient = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
        torch.testing.assert_close(gradient, expected.grad)


def test_accumulation(ranks):
    ranks(2, _accumulate, 2)
    ranks(4, _accumulate, 2)


def _others_are_ignored_still() -> None:
    ts.init_process_group(2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ts.nn.ParallelLinear.convert_parallel_linear(model, 0, ["1"])
    DistributedDataParallel(model)
    assert set(model._ddp_params_and_buffers_to_ignore) == {"0.weight", "1.weight", "1.bias"}


def test_what_others_registered_stays_registered(ranks):
    ranks(2, _others_are_ignored_still)


def _wrapped_without_registering(group_size: int) -> None:
    ts.init_process_group(group_size)
    model = nn.Sequential(nn.Linear(4, 4), ts.nn.ParallelLinear(4, 6, dim=0))
    DistributedDataParallel(model)(torch.full((2, 4), 1.0 + dist.get_rank() // group_size)).sum().backward()
    gradients = [torch.empty(6, 4) for _ in range(dist.get_world_size())]
    dist.all_gather(gradients, model[1].weight.grad.full_tensor())
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_wrapping_registers_what_was_forgotten(ranks):
    ranks(2, _wrapped_without_registering, 2)
    ranks(4, _wrapped_without_registering, 2)


# --- State ------------------------------------------------------------------------------------------------------------


def _convert_train_collect(dim: int, path: str) -> None:
    ts.init_process_group(2)
    model = _converted(dim)
    optimizer = torch.optim.SGD(model.parameters(), **_SGD)
    _train(DistributedDataParallel(model), optimizer, torch.amp.GradScaler("cpu", enabled=False), 0, 3)
    images, _ = _samples(9, 4)
    with torch.no_grad():
        output = model(images)  # of every rank's images: the same ones twice
        output = ts.distributed.gather(output, dim=-1)[:4] if dim == 1 else output[:4]
    state = ts.collect_state_dict(model, model.state_dict())
    if ts.distributed.get_rank() == 0:
        torch.save({"state": state, "images": images, "output": output}, path)


@pytest.mark.parametrize("dim", [0, 1])
def test_collected_into_the_original_class(ranks, tmp_path, dim):
    path = str(tmp_path / "model.pt")
    ranks(2, _convert_train_collect, dim, path)
    saved = torch.load(path, weights_only=True)
    original = _Net(parallel=False)
    original.load_state_dict(saved["state"])
    torch.testing.assert_close(original(saved["images"]), saved["output"], rtol=1e-6, atol=1e-6)


def _resume_as_the_script_does(path: str) -> None:
    """It saves the first rank's optimizer.state_dict(), which has that rank's parts alone."""
    ts.init_process_group(2)
    model = _converted(1)
    optimizer = torch.optim.SGD(model.parameters(), **_SGD)
    _train(DistributedDataParallel(model), optimizer, torch.amp.GradScaler("cpu", enabled=False), 0, 1)
    optimizer.load_state_dict(copy.copy(optimizer.state_dict()))  # one's own is one's own
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), path)
    dist.barrier()
    state = torch.load(path, weights_only=True)
    if dist.get_rank() == 0:
        optimizer.load_state_dict(state)
    else:
        with pytest.raises(
            ValueError, match=r"momentum_buffer of parameter 4 holds part 0 of 2, saved by another rank"
        ):
            optimizer.load_state_dict(state)


def test_momenta_of_another_rank_are_refused(ranks, tmp_path):
    ranks(2, _resume_as_the_script_does, str(tmp_path / "optimizer.pt"))


def _gather_what_does_not_fit(what: str) -> None:
    ts.init_process_group(2)
    rank = dist.get_rank()
    weight = ts.nn.ParallelLinear(4, 6, dim=0).weight
    tensors = {
        "shapes": torch.ones(3, 4 + rank),
        "dimensions": torch.ones(3) if rank else torch.ones(3, 1),
        "types": torch.ones(3, dtype=torch.float64 if rank else torch.int64),
        "another dimension": weight,
    }
    if what == "reduce":
        ts.distributed.reduce(weight)
    ts.distributed.gather(tensors[what], dim=0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shapes", "equal but for their size along it; there are rank 0: [3, 4] float32; rank 1: [3, 5] float32"),
        ("dimensions", "there are rank 0: [3, 1] float32; rank 1: [3] float32"),
        ("types", "there are rank 0: [3] int64; rank 1: [3] float64"),
        ("another dimension", "gather along dimension 0 was given a DTensor [6, 4] with placements (Shard(dim=1),)"),
        ("reduce", "reduce was given a DTensor [6, 4]"),
    ],
)
def test_what_cannot_travel(ranks, what, message):
    with pytest.raises(RankError, match=re.escape(message)):
        ranks(2, _gather_what_does_not_fit, what)


def _readme() -> None:
    ts.init_process_group(group_size=2)
    torch.manual_seed(0)
    m = torch.nn.Sequential(
        torch.nn.Linear(20, 30, bias=True),
        ts.nn.ParallelLinear(30, 30, bias=True, dim=None),
        ts.nn.ParallelLinear(30, 30, bias=True, dim=0),
        ts.nn.ParallelLinear(30, 30, bias=True, dim=1),
    )
    x, y = torch.randn(5, 20), torch.randint(30, (5,))
    state = ts.collect_state_dict(m, m.state_dict(), rank0_only=False)
    loss = ts.nn.functional.parallel_cross_entropy(m(x), y)
    loss.backward()
    plain = torch.nn.Sequential(*(torch.nn.Linear(*sizes) for sizes in [(20, 30), (30, 30), (30, 30), (30, 30)]))
    plain.load_state_dict(state)
    expected = nn.functional.cross_entropy(plain(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(m[0].weight.grad, plain[0].weight.grad)
    torch.testing.assert_close(ts.distributed.gather(m[3].weight.grad, dim=0), plain[3].weight.grad)
    torch.testing.assert_close(ts.distributed.gather(m[2].weight.data, dim=1), plain[2].weight.data)


def test_the_readme(ranks):
    ranks(2, _readme)


def _initial_values(group_size: int) -> None:
    """As TorchShard's tests do it: every rank with a seed of its own."""
    ts.init_process_group(group_size)
    torch.manual_seed(5 + dist.get_rank())
    for dim in (0, 1):
        layer = ts.nn.ParallelLinear(6, 8, dim=dim)
        seed = torch.Generator().manual_seed(5 + dist.get_rank())
        ts.nn.init.shard_init_helper_(nn.init.normal_, layer.weight, std=0.5, generator=seed)
        ts.nn.init.shard_init_helper_(nn.init.uniform_, layer.bias, generator=seed)
        first = torch.Generator().manual_seed(5 + dist.get_rank() // group_size * group_size)
        weight = nn.init.normal_(torch.empty(8, 6), std=0.5, generator=first)
        bias = nn.init.uniform_(torch.empty(8), generator=first)
        assert torch.equal(layer.weight.full_tensor(), weight)
        assert torch.equal(layer.bias.full_tensor(), bias)
        assert dim == 1 or torch.equal(layer.bias.to_local(), bias)


def test_initial_values_are_the_first_ranks(ranks):
    ranks(4, _initial_values, 2)


def test_every_name_of_torchshard_is_there_or_explained():
    page = (Path(__file__).parents[2] / "docs" / "torchshard.md").read_text()
    rows = re.findall(r"^\| `(ts\.[\w.]+)[^`]*` \| (.*?) \|", page, re.MULTILINE)
    assert len(rows) >= 30
    for name, status in rows:
        owner = ts
        found = True
        for part in name.split(".")[1:]:
            found = found and hasattr(owner, part)
            owner = getattr(owner, part, None)
        assert found != status.startswith("not there"), f"{name}: the page says {status!r}"
