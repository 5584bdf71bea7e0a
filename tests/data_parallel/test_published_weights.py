"""A module's parameters and the masters stay one truth, whoever reads or writes them, however and when."""

import unittest.mock
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from engines import ADAMW, engine_of, own_shard
from tensorshard.comm.collectives import all_gather_into
from toys import data, squares

PLANS: list[dict[str, Any]] = [dict(zero=1), dict(zero=2), dict(zero=1, precision="bf16"), dict(zero=2, offload="cpu")]
SGD = partial(torch.optim.SGD, lr=0.1)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 130), nn.Tanh(), nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 3))


def _step(engine: Any, step: int = 0) -> None:
    engine.step(*own_shard(engine, *data(step)))


def _read_in_every_way(fields: dict[str, Any]) -> list[float]:
    """How far what each way reads is from the masters, right after a step."""
    engine = engine_of(_net(), **fields)
    kept = [p.data for p in engine.model.parameters()]
    lists: list[list[torch.Tensor]] = []
    _step(engine)
    lists.append([each.clone() for each in kept])
    for step, read in enumerate(
        (
            lambda p: p.clone(),
            lambda p: p.detach().clone(),
            lambda p: torch.cat([p.flatten()]).view(p.shape),
            lambda p: torch._foreach_mul([p], 1.0)[0],
            lambda p: torch.tensor(p.tolist()),
            lambda p: torch.from_numpy(p.detach().float().numpy().copy()),
        )
    ):
        kept.clear()  # else all of these would be waited for
        _step(engine, step + 1)
        lists.append([read(p) for p in engine.model.parameters()])
        last = engine.full_state_dict() or {name: None for name, _ in engine.model.named_parameters()}
        if step == 0:
            first = last
    off = []
    for values, full in ((lists[1], first), (lists[-1], last)):
        off += [
            (value.float() - want).abs().max().item() / 2
            for value, want in zip(values, full.values(), strict=True)
            if want is not None
        ]
    return off + [float(value.isnan().any()) for values in lists for value in values]


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_reads_wait_for_the_gather(ranks, fields):
    tolerance = 4e-3 if "precision" in fields else 1e-6
    for found in ranks(2, _read_in_every_way, fields):
        assert max(found) <= tolerance


def _sent() -> list[bool]:
    """Of each gather after a step: whether all that has yet to arrive is NaN."""
    engine = engine_of(_net(), zero=1)
    found = []

    def gather(output: torch.Tensor, mine: torch.Tensor, *args: Any, **options: Any) -> Any:
        if output.numel() > 100 * 100:  # one that is not packed
            found.append(output.isnan().sum().item() == output.numel() - mine.numel() and not mine.isnan().any())
        return all_gather_into(output, mine, *args, **options)

    with unittest.mock.patch("tensorshard.comm.collectives.all_gather_into", gather):
        _step(engine)
    assert not any(p.isnan().any() for p in engine.model.parameters())
    return found


def test_what_has_not_arrived_is_nan_in_tests(ranks):
    """So that a read that does not wait would fail them. The variable is in the tests' conftest."""
    assert ranks(2, _sent) == [[True]] * 2


def _differing_writes(fields: dict[str, Any]) -> str:
    engine = engine_of(_net(), **fields)
    _step(engine)
    with torch.no_grad():
        engine.model[2].weight.add_(0.5 * torch.distributed.get_rank())
        engine.model[0].weight.mul_(0.5)
    try:
        _step(engine, 1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fields", [dict(zero=0), *PLANS], ids=str)
def test_ranks_that_write_different_values_are_told(ranks, fields):
    for sentence in ranks(2, _differing_writes, fields):
        assert "the data ranks have different values of the parameter '2.weight'" in sentence
        assert "torch.distributed.broadcast" in sentence


class _Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4, max_norm=0.1)
        self.out = nn.Linear(4, 1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.out(self.rows(index)).squeeze(-1)


def _writes_by_its_samples(fields: dict[str, Any]) -> str:
    """The second step limits another row on each rank, of which the other rank has the master."""
    engine = ts.parallelize(
        _Limited, ts.Plan(**fields), optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=nn.MSELoss(), device="cpu"
    )
    engine.step(torch.tensor([0]), torch.zeros(1))
    try:
        engine.step(torch.tensor([6 if engine.mesh.rank == 0 else 1]), torch.zeros(1))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fields", [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 1, "precision": "bf16"}], ids=str)
def test_a_forward_that_writes_by_its_samples_is_refused_in_any_step(ranks, fields):
    for sentence in ranks(2, _writes_by_its_samples, fields):
        assert "the data ranks have different values of the parameter 'rows.weight'" in sentence


def _old_graph(level: int) -> str:
    engine = engine_of(_net(), optimizer=SGD, zero=level)
    inputs, targets = own_shard(engine, *data(0))
    first, second = (squares(engine.model(inputs), targets) for _ in range(2))
    engine.backward(first)
    engine.optimizer.step()
    try:
        engine.backward(second)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_backward_through_weights_of_before_the_update_is_refused_as_on_one_process(ranks, level):
    for sentence in ranks(2, _old_graph, level):
        assert "modified by an inplace operation" in sentence


def _updates_without_a_forward(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = engine_of(_net(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), **fields)
    inputs, targets = own_shard(engine, *data(0))
    engine.backward(squares(engine.model(inputs), targets))
    for _ in range(3):
        engine.optimizer.step()
    return engine.full_state_dict()


@pytest.mark.parametrize("fields", [dict(zero=1), dict(zero=2), dict(zero=2, offload="cpu")], ids=str)
def test_a_gather_that_is_late_undoes_no_update(ranks, fields):
    found = ranks(2, _updates_without_a_forward, fields)[0]
    expected = ranks(1, _updates_without_a_forward, dict(zero=0))[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def _other_memory(dtype: torch.dtype) -> str:
    engine = engine_of(_net(), zero=1)
    weight = engine.model[2].weight
    try:
        weight.data = weight.data.to(dtype)
    except RuntimeError as error:
        return str(error)
    return ""


def test_memory_of_another_type_is_refused(ranks):
    for sentence in ranks(2, _other_memory, torch.float64):
        words = "(p.data = ..., model.half(), model.to(...)) of torch.float64"
        assert f"'2.weight' was given other memory {words}" in sentence
        assert "p.copy_(values)" in sentence


def _unwritten_digits() -> float:
    """How far masters of elements that were not written are from what they were, in bf16."""
    engine = engine_of(_net(), zero=1, precision="bf16")
    before = engine.full_state_dict()
    with torch.no_grad():
        engine.model[2].weight[:, 0] = 0.0
        engine.model[0].weight.clamp_(max=100.0)  # changes nothing
    after = engine.full_state_dict()
    if not after:
        return 0.0
    assert not after["2.weight"][:, 0].any()
    off = [(after["2.weight"][:, 1:] - before["2.weight"][:, 1:]), after["0.weight"] - before["0.weight"]]
    return max(each.abs().max().item() for each in off)


def test_masters_of_elements_that_were_not_written_keep_their_digits(ranks):
    assert ranks(2, _unwritten_digits) == [0.0, 0.0]


def _perturbed() -> float:
    """How far masters in bf16 are from what they were, after a perturbation that was taken back."""
    engine = engine_of(_net(), zero=1, precision="bf16")
    before = engine.full_state_dict()
    inputs = own_shard(engine, *data(0))[0]
    with torch.no_grad():
        for factor in (1.0, -1.0):
            for p in engine.model.parameters():
                p.add_(torch.full_like(p, 2**-8), alpha=factor)
            engine.model(inputs)
    after = engine.full_state_dict()
    off = torch.cat([(after[n] - before[n]).abs().flatten() for n in before]) if before else torch.zeros(1)
    return off.quantile(0.5).item()


def test_masters_keep_their_digits_where_a_perturbation_is_taken_back(ranks):
    assert max(ranks(2, _perturbed)) <= 1e-7


class _Averaging(torch.optim.SGD):
    """Its parameters are averages between ``eval()`` and ``train()``, as those of schedule-free optimizers are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["average"] = state.get("average", p.clone()).mul(0.5).add(p, alpha=0.5)

    @torch.no_grad()
    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["kept"] = p.clone()
            p.copy_(self.state[p]["average"])

    @torch.no_grad()
    def train(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p].pop("kept"))


def _averaged(fields: dict[str, Any], hooked: bool) -> list[float]:
    engine = engine_of(_net(), optimizer=partial(_Averaging, lr=0.1), **fields)

    @torch.no_grad()
    def shrink(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.mul_(0.9)

    if hooked:
        engine.optimizer.register_step_post_hook(shrink)
    norms = []
    for step in range(3):
        _step(engine, step)
        norms.append(torch.stack([p.detach().norm() for p in engine.model.parameters()]).norm().item())
        engine.optimizer.eval()
        norms.append(torch.stack([p.detach().norm() for p in engine.model.parameters()]).norm().item())
        norms.append(engine.evaluate(*own_shard(engine, *data(step))).item())
        engine.optimizer.train()
    return norms


@pytest.mark.slow
@pytest.mark.parametrize("hooked", [False, True])
def test_optimizers_that_write_outside_of_their_step_are_followed(ranks, hooked):
    expected = ranks(1, _averaged, dict(zero=0), hooked)[0]
    for level in (1, 2):
        for found in ranks(2, _averaged, dict(zero=level), hooked):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _gradients_shown(fields: dict[str, Any]) -> list[float]:
    """Norms of gradients as they are read, and after one is changed in place and one is replaced."""
    engine = engine_of(_net(), optimizer=ADAMW, **fields)
    inputs, targets = own_shard(engine, *data(0))
    engine.backward(squares(engine.model(inputs), targets))
    first, second, *_ = engine.model.parameters()
    norms = [p.grad.norm().item() for p in engine.model.parameters()]
    first.grad *= 2.0
    second.grad = second.grad * 3.0
    norms.append(engine.gradient_norm().item())
    norms += [first.grad.norm().item(), second.grad.norm().item()]
    second.grad = None
    norms.append(engine.gradient_norm().item())
    return norms


def test_gradients_are_whole_where_they_are_read(ranks):
    expected = ranks(1, _gradients_shown, dict(zero=0))[0]
    for fields in (dict(zero=0), dict(zero=1), dict(zero=2)):
        for found in ranks(2, _gradients_shown, fields):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
