"""Mixtures whose experts are modules in a list are split as well: each rank has some of the modules."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parity
import seeds
import tensorshard as ts
from tensorshard.expert_parallel.listed_experts import draw_seed, drawing_from, find_lists
from tensorshard.expert_parallel.search import find_routed_experts
from tensorshard.expert_parallel.stacked_experts import SortedCall


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


class ListMoE(nn.Module):
    """Each expert is called with the tokens that chose it, if there are any. A shared expert sees all tokens."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.shared = Expert()

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.softmax(-1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, -2)
        scores = self.weigh(self.router(tokens))
        weights, chosen = scores.topk(2)
        result = self.shared(tokens)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == index)
            if len(rows):
                result = result.index_add(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return result.view_as(x), scores


class LimitedMoE(ListMoE):
    """An expert takes half of the tokens at most."""

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.softmax(-1)
        best = scores.argmax(-1, keepdim=True)
        taken = torch.zeros_like(scores).scatter(-1, best, 1.0).cumsum(0).gather(-1, best)
        return scores * (taken <= max(1, len(scores) // 2))


class NoisyMoE(ListMoE):
    """The router, the experts and the shared expert draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        for expert in (*self.experts, self.shared):
            expert.append(nn.Dropout(0.3))

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores + torch.rand_like(scores) * self.training).softmax(-1)


class LimitedNoisyMoE(LimitedMoE):
    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        return super().weigh(scores + torch.rand_like(scores))


class ShuffledMoE(ListMoE):
    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        return scores[torch.randperm(len(scores))].softmax(-1)


class Mixture(nn.Module):
    def __init__(self, kind: type[ListMoE] = ListMoE) -> None:
        super().__init__()
        self.inputs = nn.Linear(5, 8)
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        entropy = x.new_zeros(())
        for layer in self.layers:
            made, scores = layer(x)
            x, entropy = x + made, entropy - (scores * scores.log()).sum(-1)
        return self.head(x) + 0.1 * entropy.view(*x.shape[:-1], 1)


def _mixture() -> nn.Module:
    seeds.seed(4)
    return Mixture()


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = seeds.generator(6)
    return [(torch.randn(8, 3, 5, generator=generator), torch.randn(8, 3, 3, generator=generator)) for _ in range(20)]


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def _train(fields: dict[str, Any]) -> dict[str, Any]:
    engine = ts.parallelize(_mixture, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=_loss)
    losses = [engine.step(*parity.shard(engine, *pair)).item() for pair in _batches()]
    return {"losses": losses, "state": engine.full_state_dict()}


_PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2-zero3": (2, dict(ep=2, zero=3)),
    "2xep2-zero3": (4, dict(ep=2, zero=3)),
    "2xep2-zero1": (4, dict(ep=2, zero=1)),
    "ep4-zero2": (4, dict(ep=4, zero=2)),
    "ep2-full": (2, dict(ep=2, zero=0, recompute="full")),
    "ep2-tp2": (4, dict(ep=2, tp=2, zero=1)),
    "ep4-cp2": (4, dict(ep=4, cp=2, zero=3)),
}


def _reference(build: Callable[[], nn.Module] = _mixture) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = build(), []
    optimizer = parity.ADAMW(model.parameters())
    for inputs, targets in _batches():
        loss = _loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("plan", _PLANS)
def test_training_is_exact(ranks, plan):
    world_size, fields = _PLANS[plan]
    losses, state = _reference()
    for result in ranks(world_size, _train, fields):
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        if result["state"]:
            parity.assert_same_state(result["state"], state, 1e-5)


class Layer(nn.Module):
    """Sixteen experts, of which a sample's tokens choose a few."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.moe = nn.LayerNorm(8), ListMoE(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.gate(x).sigmoid() * self.value(x))
        return x + self.moe(self.norm(x))[0]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.layers, self.head = nn.Linear(5, 8), nn.ModuleList(Layer() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _deep() -> nn.Module:
    seeds.seed(4)
    return Deep()


def _train_deep(fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], set[int]]:
    engine = ts.parallelize(
        _deep, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=_loss, sample_inputs=torch.randn(1, 3, 5)
    )
    losses = [engine.step(*parity.shard(engine, *pair)).item() for pair in _batches()]
    weights = [name for name in engine.sharded.masters() if ".experts." in name and name.endswith("weight")]
    return losses, engine.full_state_dict(), {engine.sharded.split.num_shards(name) for name in weights}


@pytest.mark.slow
@pytest.mark.parametrize("more", [dict(zero=1), dict(sequence_parallel=True, zero=3)], ids=str)
def test_experts_that_no_sample_token_chose_are_split_over_tp_too(ranks, more):
    losses, state = _reference(_deep)
    found = ranks(4, _train_deep, dict(ep=2, tp=2, **more))[0]
    assert found[0] == pytest.approx(losses, rel=1e-5)
    parity.assert_same_state(found[1], state, 1e-5)
    assert found[2] == {4}


def _continued(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> tuple[list[float], list[float], int]:
    first = ts.parallelize(_mixture, ts.Plan(**before), optimizer=parity.ADAMW, loss_fn=_loss)
    for pair in _batches()[:2]:
        first.step(*parity.shard(first, *pair))
    first.save(folder)
    second = ts.parallelize(_mixture, ts.Plan(**after), optimizer=parity.ADAMW, loss_fn=_loss)
    second.load(folder)
    went_on = [[e.step(*parity.shard(e, *pair)).item() for pair in _batches()[2:5]] for e in (first, second)]
    return went_on[0], went_on[1], first.sharded.held_numel()


@pytest.mark.slow
def test_checkpoints_of_other_layouts(ranks, tmp_path):
    plans = [(dict(ep=2, zero=0), dict(zero=1)), (dict(zero=3), dict(ep=2, zero=3)), (dict(ep=2, zero=3), dict(zero=0))]
    held = []
    for index, (before, after) in enumerate(plans):
        went_on, again, elements = ranks(2, _continued, tmp_path / str(index), before, after)[0]
        assert again == pytest.approx(went_on, rel=1e-5)
        held.append(elements)
    experts = sum(p.numel() for n, p in _mixture().named_parameters() if ".experts." in n)
    assert held[0] == sum(p.numel() for p in _mixture().parameters()) - experts // 2


class Sorted(nn.Module):
    """All experts of tokens that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(4, 6, 10)), nn.Parameter(torch.empty(4, 10, 6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        by_expert = tokens.view(self.up.size(0), -1, 6)
        return torch.bmm(torch.bmm(by_expert, self.up).relu(), self.down).view(-1, 6)


def test_what_is_split():
    with torch.device("meta"):
        model = nn.ModuleDict({"list": ListMoE(), "sorted": Sorted()})
    calls = find_routed_experts(model, 2)
    assert calls["sorted"] == SortedCall("tokens", (), 4)
    assert calls["list"].members == tuple(f"experts.{index}" for index in range(4))
    assert "4 experts in a list, 2 on each of 2 ranks" in calls["list"].describe(2)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (LimitedMoE, "depends on the others, as where experts take a limited number"),
        (LimitedNoisyMoE, "depends on the others, as where experts take a limited number"),
        (ShuffledMoE, "draws random numbers that are no dropout or noise"),
    ],
)
def test_lists_that_are_not_split(kind, reason):
    with torch.device("meta"):
        model = nn.ModuleDict({"moe": kind()})
    lists, why = find_lists(model, 2)
    assert not lists
    assert reason in str(why)


def test_uneven_parts_are_refused():
    with torch.device("meta"):
        model = nn.ModuleDict({"moe": ListMoE(3)})
    with pytest.raises(ValueError, match="there are 3, which are not equal parts; ep can be 3"):
        find_lists(model, 2)


def _noisy_module() -> NoisyMoE:
    seeds.seed(3)
    return NoisyMoE()


def _outcome(module: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = tokens.clone().requires_grad_()
    made, scores = module(tokens)
    (made.square().sum() + scores.square().sum()).backward()
    return made.detach(), scores.detach(), tokens.grad


def _noisy_on_ranks() -> Any:
    """What two ranks compute of the tokens of one process, and the state of the global stream afterwards."""
    group, rank = dist.group.WORLD, dist.get_rank()
    module = _noisy_module()
    lists, _ = find_lists(nn.ModuleDict({"moe": NoisyMoE().to("meta")}), 2)
    lists["moe"].split(module, group)
    tokens = torch.randn(2, 12, 8, generator=seeds.generator(5)).chunk(2)[rank]
    seeds.seed(7 + rank)
    found = _outcome(module, tokens)
    after = torch.rand(2)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return found, gradients, after


def test_random_numbers_are_the_same_on_all_ranks(ranks):
    results = ranks(2, _noisy_on_ranks)
    module = _noisy_module()
    tokens = torch.randn(2, 12, 8, generator=seeds.generator(5))
    seeds.seed(8)
    torch.randint(1 << 62, (1,))
    assert torch.equal(results[1][2], torch.rand(2))  # as if it had drawn one number
    seeds.seed(7)
    seed = draw_seed()

    def on_its_own(forward: Any, given: torch.Tensor) -> torch.Tensor:
        with drawing_from(draw_seed(), given.device):
            return forward(given)

    for expert in module.experts:
        expert.forward = partial(on_its_own, expert.forward)
    with drawing_from(seed, tokens.device):
        expected = _outcome(module, tokens)
    for name, whole, *parts in zip(("made", "scores", "grad"), expected, *(r[0] for r in results), strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name, parameter in module.named_parameters():
        given = [r[1][name] for r in results if r[1][name] is not None]
        torch.testing.assert_close(sum(given), parameter.grad, rtol=1e-4, atol=1e-5)


def _noisy_mixture() -> nn.Module:
    seeds.seed(4)
    return Mixture(NoisyMoE)


def _noisy_losses(fields: dict[str, Any]) -> list[float]:
    engine = ts.parallelize(_noisy_mixture, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=_loss, seed=2)
    return [engine.step(*parity.shard(engine, *pair)).item() for pair in _batches()[:6]]


_NOISY_PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one-micro": (1, dict(micro_batches=4)),
    "dp2-zero3-micro": (2, dict(zero=3, micro_batches=2)),
    "tp2": (2, dict(tp=2)),
    "ep2": (2, dict(ep=2, zero=1)),
    "ep2-full": (2, dict(ep=2, zero=0, recompute="full")),
    "ep2-micro": (2, dict(ep=2, zero=3, micro_batches=2)),
    "2xep2-zero3": (4, dict(ep=2, zero=3)),
    "ep2-tp2": (4, dict(ep=2, tp=2, zero=1)),
    "ep4-cp2": (4, dict(ep=4, cp=2, zero=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", _NOISY_PLANS)
def test_numbers_of_experts_belong_to_tokens(ranks, plan):
    """Noise of the router, dropout of the shared expert, and of the routed ones."""
    model, expected = _noisy_mixture(), []
    optimizer = parity.ADAMW(model.parameters())
    with ts.same_randomness(model, seed=2):
        for inputs, targets in _batches()[:6]:
            loss = _loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
    world_size, fields = _NOISY_PLANS[plan]
    for losses in ranks(world_size, _noisy_losses, fields):
        assert losses == pytest.approx(expected, rel=1e-5)
