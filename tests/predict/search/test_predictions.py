"""What predictions are put together from, against what the Engine does."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorshard as ts
from tensorshard.model.batches import call_model
from tensorshard.predict.hardware import Link, Rates
from tensorshard.predict.search.corrections import Corrections
from tensorshard.predict.search.data_collectives import find_buckets, packed_sizes, sends
from tensorshard.predict.search.model_facts import model_facts
from tensorshard.predict.search.stage_costs import StageCosts


class Model(nn.Module):
    """An odd layer that is packed, two blocks, and a layer whose weight travels by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))
        self.last = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _sent(zero: int, ranks: int) -> tuple[int, int]:
    """Sends of gradients in a step, by an estimate and by the rules."""
    if dist.is_initialized():
        dist.destroy_process_group()
    plan = ts.Plan(zero=zero).resolve(ranks)
    inputs, targets = torch.zeros(4, 7), torch.zeros(4, dtype=torch.long)
    given: Any = {"optimizer": partial(torch.optim.SGD, lr=0.1), "loss_fn": nn.functional.cross_entropy}
    found = ts.estimate(Model, plan, world_size=ranks, inputs=inputs, targets=targets, device="cpu", **given)
    transfers = found.ranks[0].operations.transfers
    gradients = [(t, n) for t, n in transfers.items() if (t.section, t.collective) == ("backward", "send")]
    kind = "reduce_scatter" if zero else "all_reduce"
    sizes = packed_sizes(find_buckets(Model(), None), plan, 4)
    return sum(n for _, n in gradients), sum(sends(kind, 4 * size, ranks)[0] for size in sizes)


@pytest.mark.parametrize(("zero", "ranks_of_data"), [(0, 4), (1, 2), (1, 4)])
def test_gradients_travel_in_as_many_messages_as_predicted(ranks, zero, ranks_of_data):
    estimated, predicted = ranks(1, _sent, zero, ranks_of_data)[0]
    assert estimated == predicted > 0


class Shared(Model):
    """The same layers are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[0]])


def _costs(model: nn.Module) -> StageCosts:
    inputs = torch.zeros(4, 7)
    assert call_model(model, inputs).shape == (4, 512)
    facts = model_facts(model, inputs, 4, {})
    assert facts is not None and facts.stages is not None
    return facts.stages


def _rates(*, bandwidth: float) -> Rates:
    """Rates that reach their peaks, without time for a launch."""
    link = Link(1e9, 0.0)
    return Rates({"float32": 1e9}, bandwidth, (1.0, 1.0), (1.0, 1.0), 0.0, False, 8, link, link, 1e9)


@pytest.mark.parametrize("model", [Model, Shared])
def test_stages_share_the_time_as_the_model_is_cut(model):
    costs = _costs(model())
    plan = ts.Plan(pp=2, zero=0, micro_batches=2).resolve(2)
    ((_, cut), _) = costs.cut(plan).spans
    products = {"first": 7 * 64, "last": 64 * 512, "blocks.0.1": 0}  # a ReLU has none
    work = [products.get(call.unit, 64 * 64) for call in costs.graph.calls]
    shares = costs.shares(plan, _rates(bandwidth=1e30))
    assert sum(shares) == pytest.approx(1)
    assert shares[0] == pytest.approx(sum(work[:cut]) / sum(work))


def test_kernels_that_are_bound_by_memory_count_by_their_bytes():
    costs = _costs(Model())
    plan = ts.Plan(pp=2, zero=0, micro_batches=2).resolve(2)
    ((_, cut), _) = costs.cut(plan).spans
    # elements that a layer reads and writes: its inputs, outputs and parameters; then those of a ReLU
    layers = [4 * (i + o) + i * o + o for i, o in ((7, 64), (64, 64), (64, 64), (64, 512))]
    moved = [one + 2 * 4 * 64 * (number in (1, 2)) for number, one in enumerate(layers)]
    shares = costs.shares(plan, _rates(bandwidth=1.0))
    assert shares[0] == pytest.approx(sum(moved[:cut]) / sum(moved))


def test_a_model_cannot_be_cut_into_more_stages_than_it_has_units():
    with pytest.raises(ValueError, match="cannot make 8 stages"):
        _costs(Model()).cut(ts.Plan(pp=8, zero=0, micro_batches=8).resolve(8))


def test_an_estimate_corrects_the_plans_with_the_same_stages():
    known = Corrections()
    near, far = (ts.Plan(zero=1, micro_batches=count).resolve(4) for count in (4, 16))
    assert known.of(near) is None
    known.note(near, 1.0, 1.1)
    known.note(far, 1.0, 1.3)
    assert known.of(ts.Plan(zero=1, micro_batches=8, recompute="full").resolve(4)) == pytest.approx(1.1)
    assert known.of(ts.Plan(zero=1, micro_batches=32).resolve(4)) == pytest.approx(1.3)
    assert known.of(ts.Plan(zero=1, pp=2, micro_batches=4).resolve(4)) is None


def test_a_mixture_of_experts_in_fp32_has_facts():
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.MixtralConfig(vocab_size=64, num_hidden_layers=2, num_local_experts=4, **sizes)
    tokens = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    facts = model_facts(partial(transformers.MixtralForCausalLM, config), tokens, 2, {})
    assert facts is not None and facts.blocks == 2
    assert facts.stages is not None and len(facts.stages.graph.calls) > 2


class Mistaken(nn.Module):
    """One whose product has the wrong shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_a_mistake_is_said_once_and_not_logged(caplog):
    if dist.is_initialized():
        dist.destroy_process_group()
    inputs, targets = torch.zeros(4, 7), torch.zeros(4, dtype=torch.long)
    given: Any = {"optimizer": partial(torch.optim.SGD, lr=0.1), "loss_fn": nn.functional.cross_entropy}
    assert model_facts(Mistaken, inputs, 4, {}) is None
    with pytest.raises(RuntimeError, match="same reduction dim"):
        ts.estimate(Mistaken, ts.Plan(), world_size=2, inputs=inputs, targets=targets, **given)
    assert not [record for record in caplog.records if "fake_tensor" in record.name]
