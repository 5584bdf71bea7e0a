"""What the TorchShard article prints, with `import tensorshard as ts`: its result is that of one device."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import seeds
import tensorshard as ts
from article import (
    SGD,
    STEPS,
    ArticleNet,
    article_optimizer,
    article_samples,
    assert_same_weights,
    converted_net,
    train_article,
)
from shards import full


def _reference(world: int, *, clip: float | None = None) -> dict[str, torch.Tensor]:
    seeds.seed(0)
    model = ArticleNet(parallel=False)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(STEPS):
        images, targets = article_samples(step, 3 * world)
        nn.functional.cross_entropy(model(images), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _as_printed(group_size: int, dim: int | None, zero: bool, clip: float | None, register: bool) -> None:
    ts.distributed.init_process_group(group_size=group_size)
    model = converted_net(dim)
    if register:
        assert (
            ts.register_ddp_parameters_to_ignore(model)
            == ({None: [], 0: ["fc.weight"], 1: ["fc.weight", "fc.bias"]}[dim])
        )
    model = DistributedDataParallel(model)
    optimizer = article_optimizer(model.parameters(), zero, **SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    train_article(model, optimizer, scaler, 0, STEPS, clip=clip)
    state = ts.collect_state_dict(model, rank0_only=False)
    state = {name.removeprefix("module."): value for name, value in state.items()}
    assert_same_weights(state, _reference(dist.get_world_size(), clip=clip))


@pytest.mark.parametrize("zero", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize(("world", "group_size"), [(2, 2), (4, 4), (4, 2)])
def test_weights_are_those_of_one_device(ranks, world, group_size, dim, zero):
    clip = 0.3 if zero or dim == 0 else None
    ranks(world, _as_printed, group_size, dim, zero, clip, dim == 1)


def _bf16(zero: bool) -> list[float]:
    ts.init_process_group(group_size=2)
    model = DistributedDataParallel(converted_net(-1))
    optimizer = article_optimizer(model.parameters(), zero, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    criterion = ts.nn.ParallelCrossEntropyLoss()
    losses = []
    for _ in range(10):
        images, target = article_samples(dist.get_rank(), 4)
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
    optimizer = article_optimizer([*plain.parameters(), *layer.parameters()], zero, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflows in (False, True, False):
        loss = (plain(torch.ones(2)).sum() + (layer.weight * 2).sum()) + layer.scale.sum()
        scaler.scale(loss).backward()
        if overflows and dist.get_rank() == 1:
            layer.weight.grad[0] = torch.inf
        before = layer.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        expected = before if overflows else before - 2  # unscaled: 16 / 8
        torch.testing.assert_close(layer.weight.detach(), expected, rtol=0, atol=0)
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
            torch.testing.assert_close(full(split[1].weight.grad, split[1].weight), whole[1].weight.grad)
            torch.testing.assert_close(split[0].weight.grad, whole[0].weight.grad)
    split[1].bias.grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(split.parameters(), 5.0, error_if_nonfinite=True)


def test_clip_grad_norm_of_a_mixture(ranks):
    ranks(2, _norms)


def _readme() -> None:
    ts.init_process_group(group_size=2)
    seeds.seed(0)
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


def test_every_name_of_torchshard_is_there_or_explained():
    page = (Path(__file__).parents[2] / "docs" / "torchshard.md").read_text()
    there, _, gone = page.partition("\n## Names\n")[2].partition("\n| not there |")
    rows = [(name, True) for name in re.findall(r"`(ts\.[\w.]+)`", there)]
    rows += [(name, False) for name in re.findall(r"^\| `(ts\.[\w.]+)`", gone, re.MULTILINE)]
    assert len(rows) >= 30
    for name, is_there in rows:
        owner = ts
        found = True
        for part in name.split(".")[1:]:
            found = found and hasattr(owner, part)
            owner = getattr(owner, part, None)
        assert found == is_there, f"{name}: the page says otherwise"
