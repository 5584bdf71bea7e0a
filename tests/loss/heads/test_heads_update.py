"""Heads that update their weight during backward, against torch.optim.SGD."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.harness import memory
from test_heads_functional import WORLDS, reference
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorshard.distributed as tsd
from shards import full
from tensorshard.compat.state import collect_state_dict, relocate_state_dict
from tensorshard.loss import tiles
from tensorshard.nn import ArcFace, ParallelLinearCrossEntropy

SGD = dict(lr=0.3, momentum=0.9, weight_decay=0.05)


def _pair(classes: int = 37, bias: bool = True, dtype: Any = torch.float64, **options: Any) -> Any:
    """A plain layer with its optimizer, and a head that updates itself."""
    torch.manual_seed(0)
    linear = nn.Linear(5, classes, bias, dtype=dtype)
    head = ParallelLinearCrossEntropy.from_linear(linear, update=dict(SGD), **options)
    return linear, torch.optim.SGD(linear.parameters(), **SGD), head


def _assert_equal(linear: nn.Linear, optimizer: torch.optim.Optimizer, head: ParallelLinearCrossEntropy) -> None:
    for name, value in linear.named_parameters():
        parameter = getattr(head, name)
        torch.testing.assert_close(full(parameter), value.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            full(head.optimizer.state[parameter]["momentum_buffer"], parameter),
            optimizer.state[value]["momentum_buffer"],
            rtol=1e-10,
            atol=1e-12,
        )


def _train(group_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "tile_width", lambda *_: 8)
        tsd.init_process_group(group_size)
        options = {} if group_size == dist.get_world_size() else {"gather_inputs": tsd.get_mesh()["dp"]}
        linear, optimizer, head = _pair(**options)
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, head.optimizer)]
        parts = dist.get_world_size() // group_size
        for step in range(5):
            micro_batches = 1 + step % 3
            for index in range(micro_batches):
                torch.manual_seed(100 * step + index)
                x, targets = torch.randn(6, 5, dtype=torch.float64), torch.randint(37, (6,))
                expected = F.cross_entropy(linear(x), targets) / micro_batches
                expected.backward()
                mine = x.chunk(parts)[tsd.get_data_parallel_rank()].requires_grad_()
                last = index == micro_batches - 1
                with (
                    torch.enable_grad() if last and step != 4 else head.accumulate()
                ):  # the last step is left to step()
                    loss = head(mine, targets.chunk(parts)[tsd.get_data_parallel_rank()]) / micro_batches
                    loss.backward()
                torch.testing.assert_close(loss, expected)
                assert mine.grad is not None
            optimizer.step()
            optimizer.zero_grad()
            head.optimizer.step()
            head.optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
        _assert_equal(linear, optimizer, head)
        assert head.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == SGD["lr"] / 4


@pytest.mark.parametrize(("world_size", "group_size"), WORLDS)
def test_it_is_sgd(ranks, world_size, group_size):
    """With momentum, weight decay, a schedule, accumulation of one to three micro-batches, and inputs gathered."""
    ranks(world_size, _train, group_size)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("margin", [None, ArcFace(0.4)])
def test_cosines_and_kept_logits(margin, keep, monkeypatch):
    monkeypatch.setattr(tiles, "tile_width", lambda *_: 8)
    options = dict(margin=margin, scale=8.0, normalize=True)
    linear, optimizer, head = _pair(bias=False, keep_logits=keep, **options)
    for _ in range(4):
        x, targets = torch.randn(6, 5, dtype=torch.float64), torch.randint(37, (6,))
        head(x, targets).backward()
        head.optimizer.step()
        optimizer.zero_grad()
        reference(x, linear.weight, targets, **options).backward()
        optimizer.step()
    if keep:
        torch.testing.assert_close(head.weight.detach(), linear.weight.detach(), rtol=0, atol=0.02)
    else:
        _assert_equal(linear, optimizer, head)


@pytest.mark.slow
def test_with_a_backbone_recomputed_and_compiled():
    torch.manual_seed(0)
    backbone = nn.Linear(4, 5)
    linear = nn.Linear(5, 37)
    own = copy.deepcopy(backbone)
    head = ParallelLinearCrossEntropy.from_linear(linear, update=dict(SGD))
    plain = torch.optim.SGD([*backbone.parameters(), *linear.parameters()], **SGD)
    rest = torch.optim.SGD(own.parameters(), **SGD)

    def run(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return head(own(x), targets)

    for call in (run, lambda *a: checkpoint(run, *a, use_reentrant=False), torch.compile(run, backend="aot_eager")):
        x, targets = torch.randn(6, 4), torch.randint(37, (6,))
        F.cross_entropy(linear(backbone(x)), targets).backward()
        call(x, targets).backward()
        for optimizer in (plain, rest, head.optimizer):
            optimizer.step()
            optimizer.zero_grad()
    for got, want in zip([*own.parameters(), *head.parameters()], plain.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-5, atol=1e-6)


def test_nothing_is_updated_without_backward():
    _, _, head = _pair()
    before = head.weight.clone()
    x, targets = torch.randn(6, 5, dtype=torch.float64), torch.randint(37, (6,))
    with torch.no_grad():
        head(x, targets)
    head(x, targets)
    head.optimizer.step()
    assert torch.equal(head.weight, before) and not head.optimizer.state


def _exchange_states() -> None:
    tsd.init_process_group(2)
    linear, optimizer, head = _pair(bias=True)
    x, targets = torch.randn(6, 5, dtype=torch.float64), torch.randint(37, (6,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(linear(x), targets).backward()
        optimizer.step()
        head(x, targets).backward()
        head.optimizer.step()

    step()
    model, state = collect_state_dict(head, rank0_only=False), collect_state_dict(head.optimizer, rank0_only=False)
    assert state["state"][0]["momentum_buffer"].shape == (37, 5)
    # A plain layer goes on from the head's state, and a head from a plain layer's.
    linear.load_state_dict(model)
    optimizer.load_state_dict(copy.deepcopy(state))
    sharded = head.optimizer.state_dict()
    _, _, other = _pair(bias=True)
    for given in (sharded, relocate_state_dict(other.optimizer, optimizer.state_dict()), optimizer.state_dict(), state):
        other.load_state_dict(linear.state_dict())
        other.optimizer.load_state_dict(given)
        _assert_equal(linear, optimizer, other)
    head = other
    step()
    _assert_equal(linear, optimizer, head)


def _step_after_states() -> None:
    tsd.init_process_group(2)
    linear, optimizer, head = _pair(bias=True)
    fake_copy = copy.deepcopy(head)
    assert fake_copy.optimizer.holds(fake_copy.weight)
    for index in range(3):
        x, targets = torch.randn(6, 5, dtype=torch.float64), torch.randint(37, (6,))
        optimizer.zero_grad()
        F.cross_entropy(linear(x), targets).backward()
        optimizer.step()
        head(x, targets).backward()
        head.optimizer.step()
        _assert_equal(linear, optimizer, head)
        if index == 1:  # a new head from whole and from sharded states
            head.to(torch.float64)
            assert head.optimizer.holds(head.weight)
    assert not torch.equal(full(fake_copy.weight), full(head.weight))


def test_states_are_those_of_sgd(ranks):
    ranks(2, _exchange_states)
    ranks(2, _step_after_states)


def _refusals() -> None:
    tsd.init_process_group(1)
    _refuse()


def test_what_cannot_be_combined(ranks):
    _refuse()
    ranks(1, _refusals)  # a split parameter


def _refuse() -> None:
    _, _, head = _pair(bias=False, dtype=torch.float32)
    model = nn.ModuleDict({"head": head})
    x, targets = torch.randn(6, 5), torch.randint(37, (6,))
    model.zero_grad()
    head(x, targets).backward()
    outer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    for use in (
        lambda: head.weight.grad,
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        outer.step,
        lambda: scaler.unscale_(outer),
    ):
        with pytest.raises(RuntimeError, match="a head built with update= changes its weight during backward"):
            use()
    head.optimizer.step()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="a head built with update= changes its weight"):
        head.weight.grad = torch.zeros(37, 5)
    head.to(torch.float32).double().float()
    head(x, targets).backward()
    with pytest.raises(RuntimeError, match="a head built with update= changes its weight"):
        _ = head.weight.grad
    for context in ({"dtype": torch.float16}, {}):
        half = torch.autocast("cpu", **context) if context else torch.enable_grad()
        with half, pytest.raises(RuntimeError, match="was called in fp16, whose losses a GradScaler scales"):
            head(x if context else x.half(), targets)
    first, second = head(x, targets), head(x, targets)
    first.backward()
    with pytest.raises(RuntimeError, match="was updated between this loss's forward and its backward"):
        second.backward()
    with head.accumulate():
        (head(x, targets) + head(x, targets)).backward()
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        head.optimizer.zero_grad()
    with pytest.raises(ValueError, match="take it after step"):
        head.optimizer.load_state_dict(head.optimizer.state_dict())
    head.optimizer.step()
    with pytest.raises(RuntimeError, match=r"logits\(\) was called for a gradient"):
        head.logits(x.requires_grad_())
    head.weight = nn.Parameter(full(head.weight))
    with pytest.raises(RuntimeError, match="its optimizer still has the old one"):
        head(x, targets)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"momentum": 0.9}, "update= was given no 'lr'"),
        (
            {"lr": 0.1, "nesterov": True},
            "given the unknown 'nesterov': it runs SGD with momentum and takes lr, momentum",
        ),
        ({"lr": -1.0}, "lr=-1.0: use 0 or more"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum=1.0: use 0 or more, below 1"),
        ({"lr": 0.1, "momentum_dtype": "int4"}, r"use one of \['fp32', 'bf16', 'int8'\]"),
    ],
)
def test_bad_updates(update, message):
    with pytest.raises(ValueError, match=message):
        ParallelLinearCrossEntropy(5, 12, update=update)
    with pytest.raises(ValueError, match="a weight in fp16"):
        ParallelLinearCrossEntropy(5, 12, update=dict(lr=0.1), dtype=torch.float16)
    with pytest.raises(ValueError, match="a weight in fp64: leave it out"):
        ParallelLinearCrossEntropy(5, 12, update=dict(lr=0.1, momentum_dtype="bf16"), dtype=torch.float64)
    _, _, head = _pair()
    state = torch.optim.SGD(nn.Linear(5, 37).parameters(), lr=0.1, momentum=0.9, nesterov=True).state_dict()
    with pytest.raises(ValueError, match=r"the state of an SGD with {'nesterov': True} was given"):
        head.optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="the state of 1 parameters in 1 groups was given"):
        head.optimizer.load_state_dict(torch.optim.SGD([torch.zeros(1)], lr=0.1).state_dict())


def test_sampled_rows_alone_are_updated():
    torch.manual_seed(0)
    linear = nn.Linear(5, 100, False)
    head = ParallelLinearCrossEntropy.from_linear(linear, update=dict(SGD), sample_rate=0.2)
    x, targets = torch.randn(6, 5), torch.randint(100, (6,))
    torch.manual_seed(7)
    head(x, targets).backward()
    moved = (head.weight.detach() - linear.weight.detach()).abs().sum(1) > 0
    assert moved[targets].all() and moved.sum() == 20
    chosen = moved.nonzero()[:, 0]
    part = linear.weight.detach()[chosen].requires_grad_()
    optimizer = torch.optim.SGD([part], **SGD)
    F.cross_entropy(F.linear(x, part), torch.searchsorted(chosen, targets)).backward()
    optimizer.step()
    torch.testing.assert_close(head.weight.detach()[chosen], part.detach())


def _peak_bytes(plain: bool) -> int:
    torch.manual_seed(0)
    samples, features, classes = 256, 512, 40_000
    x, targets = torch.randn(samples, features, requires_grad=True), torch.randint(classes, (samples,))
    if plain:
        linear = nn.Linear(features, classes, False)
        run = lambda: F.cross_entropy(linear(x), targets)  # noqa: E731
    else:
        head = ParallelLinearCrossEntropy(features, classes, update=dict(SGD), keep_logits=False)
        run = lambda: head(x, targets)  # noqa: E731
        run().backward()  # makes the momentum
    memory.reset_peak()
    held = memory.resident_bytes()
    run().backward()
    return memory.peak_resident_bytes() - held


def test_neither_logits_nor_a_gradient_are_held(ranks):
    """A gradient takes 82 MB, and logits 41 MB."""
    assert ranks(1, _peak_bytes, False)[0] < 12e6
    assert ranks(1, _peak_bytes, True)[0] > 0.9 * (82e6 + 41e6)
