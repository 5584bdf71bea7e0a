"""Convolutional networks under Plan(tp=...): what is split, and training as one process does."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import convolutional_models as models
import parity
import seeds
import tensorshard as ts
from tensorshard.tensor_parallel.search.check_table import check_tensor_table
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.table import TensorTable, VerifiedTable

STEPS = 4
SAMPLES = 8

# At tp=2; more at tp=4.
LEAST_SHARES = dict.fromkeys(models.KINDS, 0.9) | {"convnext": 0.7}

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, dict(tp=2)),
    "tp4": (4, dict(tp=4)),
    "tp2_dp2": (4, dict(tp=2, zero=0)),
    "tp2_zero3": (4, dict(tp=2, zero=3)),
    "tp2_recompute": (2, dict(tp=2, recompute="full")),
    "tp2_selective": (2, dict(tp=2, recompute="selective")),
    "tp2_zero3_recompute": (4, dict(tp=2, zero=3, recompute="full")),
    "tp2_pp2": (4, dict(tp=2, pp=2, pp_schedule="gpipe", micro_batches=1)),
}
# Every model at tp=2; under each further plan some of them, each model under at least two.
FURTHER = {
    "tp4": ["efficient", "autoencoder", "wavenet"],
    "tp2_dp2": ["basic", "volumes"],
    "tp2_zero3": ["unet", "bottleneck"],
    "tp2_recompute": ["basic", "convnext", "wavenet"],
    "tp2_selective": ["resnext", "unet"],
    "tp2_zero3_recompute": ["efficient", "resnext", "autoencoder"],
    "tp2_pp2": ["basic", "unet"],
}
CASES = [("tp2", kind) for kind in models.KINDS] + [(plan, kind) for plan, kinds in FURTHER.items() for kind in kinds]


@cache
def table(kind: str, size: int) -> VerifiedTable:
    return find_tensor_plan(build(kind), size, inputs=sample(kind))


def build(kind: str) -> nn.Module:
    """A model in fp64 whose norms and biases are not all alike: through batch norms, rounding grows to 1e-5 in fp32."""
    seeds.seed(1)
    model = models.make(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.double()


def batch(kind: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = models.batch(kind, SAMPLES, seeds.generator(100 + step))
    return inputs.double(), targets.double() if targets.is_floating_point() else targets


def sample(kind: str) -> torch.Tensor:
    return models.sample(kind).double()


def make_engine(kind: str, fields: dict[str, Any], given: dict[str, str] | None) -> ts.Engine:
    plan = ts.Plan(**fields, tp_plan=given, tp_check=given is None)
    return ts.parallelize(
        build(kind), plan, optimizer=parity.ADAMW, loss_fn=models.loss(kind), sample_inputs=sample(kind)
    )


def train(kind: str, fields: dict[str, Any], given: dict[str, str]) -> dict[str, Any]:
    engine = make_engine(kind, fields, given)
    initial = engine.full_state_dict()
    losses = [engine.step(*parity.shard(engine, *batch(kind, step))).item() for step in range(STEPS)]
    with torch.no_grad():
        evaluated = engine.evaluate(*parity.shard(engine, *batch(kind, STEPS))).item()
    return {"initial": initial, "losses": [*losses, evaluated], "state": engine.full_state_dict()}


@cache
def reference(kind: str) -> dict[str, Any]:
    model = build(kind)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = parity.ADAMW(model.parameters())
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(kind, step)
        loss = models.loss(kind)(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        inputs, targets = batch(kind, STEPS)
        losses.append(models.loss(kind)(model.eval()(inputs), targets).item())
    return {"initial": initial, "losses": losses, "state": model.state_dict()}


@pytest.mark.slow_cases("4", "unet")
@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_most_weights_are_split(kind, size):
    assert table(kind, size).split_share >= LEAST_SHARES[kind]


@pytest.mark.fast_cases("tp2-efficient")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_training_as_one_process_does(ranks, name, kind):
    world_size, fields = PLANS[name]
    found = ranks(world_size, train, kind, fields, table(kind, fields["tp"]).plan.to_dict())[0]
    expected = reference(kind)
    parity.assert_same_state(found["initial"], expected["initial"], 0.0)
    parity.assert_same(found, expected, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", models.KINDS_OF_TRANSFORMERS)
def test_models_of_transformers(ranks, kind):
    found = table(kind, 2)
    assert found.split_share >= 0.8
    parity.assert_same(ranks(4, train, kind, dict(tp=2), found.plan.to_dict())[0], reference(kind), 1e-8)


def from_a_constructor(fields: dict[str, Any], given: dict[str, str] | None) -> dict[str, torch.Tensor]:
    plan = ts.Plan(**fields, tp_plan=given, tp_check=given is None)
    model = partial(models.make, "efficient")
    return ts.parallelize(model, plan, optimizer=parity.ADAMW, loss_fn=models.loss("efficient")).full_state_dict()


def test_initial_weights_do_not_depend_on_the_plan(ranks):
    expected = ranks(1, from_a_constructor, {}, None)[0]
    given = table("efficient", 2).plan.to_dict()
    parity.assert_same_state(ranks(2, from_a_constructor, dict(tp=2), given)[0], expected, 0.0)


def save(fields: dict[str, Any], given: dict[str, str] | None, path: str) -> list[float]:
    engine = make_engine("efficient", fields, given)
    for step in range(2):
        engine.step(*parity.shard(engine, *batch("efficient", step)))
    engine.save(path)
    return continued(engine)


def resume(fields: dict[str, Any], given: dict[str, str] | None, path: str) -> list[float]:
    engine = make_engine("efficient", fields, given)
    with torch.no_grad():
        for tensor in (*engine.sharded.masters().values(), *engine.sharded.persistent_buffers().values()):
            tensor.zero_()
    engine.load(path)
    return continued(engine)


def continued(engine: ts.Engine) -> list[float]:
    """Losses that depend on weights, states of the optimizer, and running statistics."""
    first = engine.evaluate(*parity.shard(engine, *batch("efficient", 5))).item()
    return [first, *(engine.step(*parity.shard(engine, *batch("efficient", step))).item() for step in range(2, 4))]


@pytest.mark.slow
@pytest.mark.parametrize("written", [(4, dict(tp=2, zero=3)), (1, {})], ids=str)
def test_checkpoints_between_sizes_of_tp(ranks, tmp_path, written):
    world_size, fields = written
    found = {size: table("efficient", size).plan.to_dict() for size in (2, 4)} | {1: None}
    expected = ranks(world_size, save, fields, found[fields.get("tp", 1)], str(tmp_path / "c"))[0]
    for other_size, other in [(1, {}), (2, dict(tp=2)), (4, dict(tp=4))]:
        resumed = ranks(other_size, resume, other, found[other.get("tp", 1)], str(tmp_path / "c"))[0]
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(expected), rtol=1e-5, atol=1e-5)


class MixesInTraining(nn.BatchNorm2d):
    """In evaluation, in which blocks are compared, it is a batch norm like any other."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input - input.mean(1, keepdim=True) if self.training else input)


def test_a_norm_that_mixes_channels_in_training_is_not_split():
    model = build("basic")
    for block in model.blocks:
        block.norm1 = MixesInTraining(block.norm1.num_features)
    found = find_tensor_plan(model.double(), 2, inputs=sample("basic"))
    styles = {name: str(style) for name, style in found.plan.resolve(model).items()}
    assert styles["blocks.1.conv1"] == styles["blocks.1.conv2"] == "colwise_gather"
    assert not any("norm1" in name for name in styles)


def test_a_wrong_table_is_refused():
    given = TensorTable.from_dict({"blocks.*.conv1": "colwise", "blocks.*.conv2": "rowwise"})
    with pytest.raises(ValueError, match=r"blocks\.\* \(as blocks\.0\)"):
        check_tensor_table(build("basic"), given, 2, inputs=sample("basic"))


def losses(kind: str, fields: dict[str, Any], given: dict[str, str] | None) -> torch.Tensor:
    engine = make_engine(kind, fields, given)
    return torch.stack([engine.step(*parity.shard(engine, *batch(kind, step))) for step in range(STEPS)])


@pytest.mark.parametrize("kind", ["efficient", pytest.param("unet", marks=pytest.mark.slow)])
def test_bf16_is_near_what_one_process_computes_in_it(ranks, kind):
    alone = ranks(1, losses, kind, dict(precision="bf16"), None)[0]
    found = ranks(2, losses, kind, dict(precision="bf16", tp=2), table(kind, 2).plan.to_dict())[0]
    torch.testing.assert_close(found, alone, rtol=1e-2, atol=0)
    assert not torch.equal(found, torch.tensor(reference(kind)["losses"][:STEPS]))
