"""``Plan(ep=N)`` trains mixtures of experts as one process does."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import adam

import parity
import seeds
import tensorshard as ts
from tensorshard.comm.sharding import to_local
from tensorshard.expert_parallel.search import find_routed_experts

Tensors = list[torch.Tensor]

# id: (model, ranks, fields of the plan)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ep2-zero0": ("mixtral", 2, dict(ep=2, zero=0)),
    "ep2-zero1-clip": ("mixtral", 2, dict(ep=2, zero=1, clip_grad_norm=0.5)),
    "ep2-zero2-micro2-full": ("mixtral", 2, dict(ep=2, zero=2, micro_batches=2, recompute="full")),
    "ep4-zero0-micro2": ("mixtral", 4, dict(ep=4, zero=0, micro_batches=2)),
    "ep4-zero2": ("mixtral", 4, dict(ep=4, zero=2)),
    "2xep2-zero0": ("mixtral", 4, dict(ep=2, zero=0)),
    "2xep2-zero1": ("mixtral", 4, dict(ep=2, zero=1)),
    "2xep2-zero2-micro4-clip": ("mixtral", 4, dict(ep=2, zero=2, micro_batches=4, clip_grad_norm=0.5)),
    "ep2-zero3-clip": ("mixtral", 2, dict(ep=2, zero=3, clip_grad_norm=0.5)),
    "ep4-zero3-full": ("mixtral", 4, dict(ep=4, zero=3, recompute="full")),
    "2xep2-zero3-micro2": ("mixtral", 4, dict(ep=2, zero=3, micro_batches=2)),
    "2-replicas-ep2-zero3-micro2": ("mixtral", 4, dict(dp_replicate=2, dp_shard=2, ep=2, zero=3, micro_batches=2)),
    "2-replicas-2xep2-zero3": ("mixtral", 8, dict(dp_replicate=2, dp_shard=4, ep=2, zero=3)),
    "ep2-pp2-zero1-micro2-clip": ("mixtral", 4, dict(ep=2, pp=2, zero=1, micro_batches=2, clip_grad_norm=0.5)),
    "ep2-pp2-zero3-micro2": ("mixtral", 4, dict(ep=2, pp=2, zero=3, micro_batches=2)),
    "ep2-interleaved-zero2-micro4-full": (
        "mixtral",
        4,
        dict(ep=2, pp=2, pp_schedule="interleaved_1f1b", zero=2, micro_batches=4, recompute="full"),
    ),
    "ep2-zero1-offload": ("mixtral", 2, dict(ep=2, zero=1, offload="cpu")),
    "ep2-zero3-offload-full": ("mixtral", 2, dict(ep=2, zero=3, offload="disk", recompute="full")),
    "ep2-zero3-compile": ("mixtral", 2, dict(ep=2, zero=3, compile=True)),
    "ep2-tp2-zero1-clip": ("mixtral", 4, dict(ep=2, tp=2, zero=1, clip_grad_norm=0.5)),
    "ep2-sp2-zero3-micro2-full": (
        "mixtral",
        4,
        dict(ep=2, tp=2, sequence_parallel=True, zero=3, micro_batches=2, recompute="full"),
    ),
    "ep2-tp2-pp2-zero3-micro2": ("mixtral", 8, dict(ep=2, tp=2, pp=2, zero=3, micro_batches=2)),
    "ep2-cp2-zero1-clip": ("mixtral", 2, dict(ep=2, cp=2, zero=1, clip_grad_norm=0.5)),
    "ep2-cp2-zero3-full": ("mixtral", 2, dict(ep=2, cp=2, zero=3, recompute="full")),
    "ep4-cp2-zero2": ("mixtral", 4, dict(ep=4, cp=2, zero=2, micro_batches=2)),
    "2xep2-cp2-zero3": ("mixtral", 4, dict(ep=2, cp=2, zero=3)),
    "ep2-cp2-pp2-zero1-micro2": ("mixtral", 4, dict(ep=2, cp=2, pp=2, zero=1, micro_batches=2)),
    "ep2-cp2-tp2-zero0": ("mixtral", 4, dict(ep=2, cp=2, tp=2, zero=0)),
    "2-replicas-ep2-zero0": ("mixtral", 4, dict(dp_replicate=2, dp_shard=2, ep=2, zero=0)),
    "2-replicas-ep2-zero1": ("mixtral", 4, dict(dp_replicate=2, dp_shard=2, ep=2, zero=1)),
    "2-replicas-ep2-zero2-micro2": ("mixtral", 4, dict(dp_replicate=2, dp_shard=2, ep=2, zero=2, micro_batches=2)),
}


@pytest.mark.fast_cases("ep2-zero1-clip")
@pytest.mark.parametrize("case", CASES)
def test_fp32_is_exact(ranks, case):
    kind, world_size, fields = CASES[case]
    found = ranks(world_size, parity.train, kind, fields)
    expected = parity.reference(kind, fields.get("clip_grad_norm"), parity.STEPS)
    parity.assert_same(found[0], expected, 1e-5)
    if expected["norms"]:
        assert found[0]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for other in found[1:]:
        assert other["losses"] == found[0]["losses"]
        assert other["norms"] == found[0]["norms"]


_SGD = partial(torch.optim.SGD, lr=1e3)  # weights move by as much as the gradient says


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["ep4-zero2", "ep2-tp2-zero1-clip", "ep2-sp2-zero3-micro2-full", "ep2-pp2-zero3-micro2"]
)
def test_every_gradient_is_exact(ranks, case):
    kind, world_size, fields = CASES[case]
    given = {**fields, "clip_grad_norm": None}
    found = ranks(world_size, parity.train, kind, given, 1, optimizer=_SGD)[0]["state"]
    expected, start = parity.reference(kind, steps=1, optimizer=_SGD)["state"], parity.build(kind).state_dict()
    assert any(".gate." in name for name in expected)
    largest = max((value - start[name]).norm() for name, value in expected.items())
    for name, value in expected.items():
        gradient = value - start[name]
        assert (found[name] - value).norm() < 1e-5 * max(gradient.norm(), 1e-2 * largest), name


def _saved(folder: Path, fields: dict[str, Any]) -> list[float]:
    engine = parity.make_engine("mixtral", fields)
    for step in range(2):
        engine.step(*parity.shard(engine, *parity.batch("mixtral", step)))
    engine.save(folder)
    return [engine.step(*parity.shard(engine, *parity.batch("mixtral", step))).item() for step in (2, 3)]


def _loaded(folder: Path, fields: dict[str, Any]) -> list[float]:
    engine = parity.make_engine("mixtral", fields)
    engine.load(folder)
    return [engine.step(*parity.shard(engine, *parity.batch("mixtral", step))).item() for step in (2, 3)]


@pytest.mark.slow
def test_checkpoints_of_other_layouts(ranks, tmp_path):
    plans = [(dict(ep=2, zero=1), dict(zero=3)), (dict(zero=1), dict(ep=2, zero=2)), (dict(ep=2, zero=0), dict(zero=1))]
    plans += [(dict(ep=2, zero=3), dict(zero=0)), (dict(ep=2, zero=1), dict(ep=2, zero=3))]
    for index, (before, after) in enumerate(plans):
        went_on = ranks(2, _saved, tmp_path / str(index), before)[0]
        assert ranks(2, _loaded, tmp_path / str(index), after)[0] == pytest.approx(went_on, rel=1e-5)


def _held(fields: dict[str, Any]) -> list[int]:
    """Bytes of a rank's parameters, of the gradients of experts as the optimizer gets them, and of their states."""
    engine = parity.make_engine("mixtral", fields)
    experts = {p for name, p in engine.sharded.masters().items() if ".experts." in name}
    held = [4 * engine.sharded.held_numel(), 0, 0]
    update = adam.adam

    def count(parameters: Tensors, gradients: Tensors, means: Tensors, squares: Tensors, *others: Any, **settings: Any):
        for p, gradient, *states in zip(parameters, gradients, means, squares, strict=True):
            if p in experts:
                held[1] += to_local(gradient).nbytes
                held[2] += sum(to_local(state).nbytes for state in states)
        update(parameters, gradients, means, squares, *others, **settings)

    with mock.patch.object(adam, "adam", count):  # hooks, and who reads the states, get whole tensors
        engine.step(*parity.shard(engine, *parity.batch("mixtral", 0)))
    return held


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_rank_holds_its_part_of_the_experts(ranks, zero):
    """Of parameters, gradients and optimizer states, 1/N of what one process has; ZeRO and tp shard that further."""
    sizes = {name: p.nbytes for name, p in parity.build("mixtral").named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - experts
    for world_size, ep in ((2, 2), (4, 4), (4, 2)):
        shards = world_size // ep if zero == 3 else 1
        of_states = world_size // ep if zero else 1
        for parameters, gradients, states in ranks(world_size, _held, dict(ep=ep, zero=zero)):
            rest = others / (world_size if zero == 3 else 1)
            assert parameters == pytest.approx(experts / ep / shards + rest, rel=0.02)
            assert gradients == pytest.approx(experts / ep / of_states, rel=0.02)
            assert states == pytest.approx(2 * experts / ep / of_states, rel=0.02)
    for parameters, gradients, states in ranks(4, _held, dict(ep=2, tp=2, zero=zero)):
        assert experts / 4 <= parameters <= 1.02 * experts / 4 + others
        assert gradients == pytest.approx(experts / 4, rel=0.02)
        assert states == pytest.approx(2 * experts / 4, rel=0.02)


def _saved_and_loaded(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> tuple[list[float], list[float]]:
    return _saved(folder, before), _loaded(folder, after)


@pytest.mark.slow
def test_checkpoints_with_tensor_parallelism(ranks, tmp_path):
    both, sharded = dict(ep=2, tp=2, zero=1), dict(ep=2, tp=2, zero=3)
    plans = [(both, sharded), (sharded, dict(tp=2, zero=1)), (both, dict(zero=0)), (dict(ep=4, zero=3), both)]
    for index, (first, second) in enumerate(plans):
        for before, after in ranks(4, _saved_and_loaded, tmp_path / str(index), first, second):
            assert after == pytest.approx(before, rel=1e-5)


def _refused(fields: dict[str, Any]) -> str:
    try:
        parity.make_engine("mixtral", fields)
    except ValueError as error:
        return str(error)
    return ""


_EXPERTS = "model.layers.*.mlp.experts"


@pytest.mark.slow
def test_a_table_that_cuts_experts_from_each_other_is_refused(ranks):
    table = {f"{_EXPERTS}.gate_up_proj": "slice(0)", "lm_head": "colwise"}
    for message in ranks(4, _refused, dict(ep=2, tp=2, zero=1, tp_plan=table, tp_check=False)):
        assert f"tp_plan names {_EXPERTS}.gate_up_proj, which cuts whole experts from each other" in message


@pytest.mark.slow
def test_a_table_that_names_experts(ranks):
    table = {_EXPERTS: "sum", f"{_EXPERTS}.gate_up_proj": "slice(1, 2)", f"{_EXPERTS}.down_proj": "slice(2)"}
    found = ranks(4, parity.train, "mixtral", dict(ep=2, tp=2, zero=1, tp_plan=table))
    parity.assert_same(found[0], parity.reference("mixtral"), 1e-5)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def _optimizer_refused(fields: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="looks at whole tensors") as error:
        parity.make_engine("mixtral", fields, optimizer=_adafactor)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_optimizers_of_whole_tensors_are_refused(ranks, zero):
    assert "ep=2 was given with Adafactor" in ranks(2, _optimizer_refused, dict(ep=2, zero=zero))[0]


class Handmade(nn.Module):
    """Experts with biases, under names of their own, and arguments in another order."""

    def __init__(self, *, uses_all: bool = False) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(4, 6, 10))
        self.up_bias = nn.Parameter(torch.empty(4, 10))
        self.down = nn.Parameter(torch.empty(4, 10, 6))
        self.uses_all = uses_all

    def forward(self, chosen: torch.Tensor, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for k in range(chosen.size(1)):
            up, down = self.up[chosen[:, k]], self.down[chosen[:, k]]
            hidden = torch.einsum("tf,tfh->th", x, up) + self.up_bias[chosen[:, k]]
            result = result + gate[:, k, None] * torch.einsum("th,thf->tf", hidden.relu(), down)
        return result + self.up.mean() if self.uses_all else result


class Adapted(nn.Module):
    """Adds to a parameter of the experts in it, as adapters on experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.changed, self.own = "up", Handmade()


def test_experts_are_found_by_what_they_compute():
    with torch.device("meta"):
        model = nn.ModuleDict({"own": Handmade()})
    call = find_routed_experts(model, 2)["own"]
    assert (call.tokens, call.choices, call.weights, call.counts, call.experts) == ("x", "chosen", "gate", (), 4)


def test_experts_that_depend_on_each_other_are_refused():
    with torch.device("meta"):
        model = nn.ModuleDict({"own": Handmade(uses_all=True)})
    with pytest.raises(ValueError, match=r"the experts of 'own' \(Handmade\) cannot be split .* are not the sums"):
        find_routed_experts(model, 2)
    with torch.device("meta"):
        model = nn.ModuleDict({"own": Handmade()})
    with pytest.raises(ValueError, match="there are 4, which are not equal parts; ep can be 2, 4"):
        find_routed_experts(model, 3)
    with torch.device("meta"):
        model = nn.ModuleDict({"wrapped": Adapted()})
    with pytest.raises(ValueError, match=r"Adapted names their parameter 'up' \(changed\) and changes it"):
        find_routed_experts(model, 2)
    with pytest.raises(ValueError, match="Linear has no module that ep splits"):
        find_routed_experts(nn.Linear(3, 3), 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(ep=3, dp_shard=4, zero=1), "of which there are 4; ep can be 1, 2, 4"),
        (dict(ep=4, cp=2, pp=2, zero=1), "dp_shard and cp, of which there are 2; ep can be 1, 2"),
    ],
)
def test_what_does_not_go_with_it_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ts.Plan(**fields).resolve(4)


class FirstExpertsOnly(nn.Module):
    """A mixture of four experts, of which tokens choose the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.own = Handmade()
        generator = seeds.generator(3)
        for parameter in self.own.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, chosen = self.router(x).softmax(-1).topk(2)
        return self.own(chosen, gate, x)


def _first_experts_only() -> nn.Module:
    seeds.seed(2)
    return FirstExpertsOnly()


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(torch.randn(4, 2, 8, 6, generator=seeds.generator(5)).unbind())


def _train_first_experts(fields: dict[str, Any]) -> dict[str, Any]:
    engine = ts.parallelize(
        _first_experts_only(), ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=nn.functional.mse_loss
    )
    losses = [engine.step(*parity.shard(engine, *pair)).item() for pair in _batches()]
    return {"losses": losses, "state": engine.full_state_dict()}


def test_a_rank_whose_experts_get_no_tokens(ranks):
    model, losses = _first_experts_only(), []
    optimizer = parity.ADAMW(model.parameters())
    for inputs, targets in _batches():
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for found in ranks(2, _train_first_experts, dict(ep=2, zero=1, micro_batches=2)):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        if found["state"]:
            parity.assert_same_state(found["state"], model.state_dict(), 1e-5)


def _evaluated(fields: dict[str, Any]) -> tuple[float, torch.Tensor]:
    engine = parity.make_engine("mixtral", fields)
    inputs, targets = parity.shard(engine, *parity.batch("mixtral", 0))
    return engine.evaluate(inputs, targets).item(), engine.predict(inputs).logits


@pytest.mark.slow
def test_evaluation(ranks):
    model = parity.build("mixtral").eval()
    inputs, targets = parity.batch("mixtral", 0)
    with torch.no_grad():
        output = model(**inputs)
    summed, count = parity.loss_function("mixtral")(output, targets)
    found = ranks(2, _evaluated, dict(ep=2, zero=1))
    assert [loss for loss, _ in found] == pytest.approx([(summed / count).item()] * 2, rel=1e-6)
    torch.testing.assert_close(torch.cat([logits for _, logits in found]), output.logits, rtol=1e-5, atol=1e-6)
