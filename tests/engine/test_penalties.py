"""Penalties on the weights: what one process computes, under any plan."""

from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts

STEPS = 3

# ranks, and fields of the plan
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero0": (2, dict(zero=0)),
    "zero1-clip": (2, dict(zero=1, clip_grad_norm=0.5)),
    "zero2-micro2": (2, dict(zero=2, micro_batches=2)),
    "zero3-micro2-clip": (2, dict(zero=3, micro_batches=2, clip_grad_norm=0.5)),
    "hybrid": (4, dict(dp_replicate=2, dp_shard=2, zero=3)),
    "tp": (2, dict(tp=2)),
    "tp-zero3": (4, dict(tp=2, dp_shard=2, zero=3, micro_batches=2)),
    "offload": (2, dict(zero=2, micro_batches=2, offload="cpu")),
    "offload-zero3": (2, dict(zero=3, offload=ts.Offload(optimizer="cpu", gradients="cpu", parameters="cpu"))),
    "pp": (2, dict(pp=2, micro_batches=2, clip_grad_norm=0.5)),
    "pp-interleaved": (2, dict(pp=2, micro_batches=4, pp_schedule="interleaved_1f1b")),
    "pp-zbv": (2, dict(pp=2, micro_batches=4, pp_schedule="zbv")),
    "pp-recompute": (2, dict(pp=2, micro_batches=2, recompute="full", offload="cpu")),
    "pp-tp": (4, dict(pp=2, tp=2, micro_batches=2)),
    "pp-zero1": (4, dict(pp=2, dp_shard=2, zero=1, micro_batches=2)),
    "pp-zero3": (4, dict(pp=2, dp_shard=2, zero=3, micro_batches=2)),
}


class Tied(nn.Module):
    """Blocks, and an output layer that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1][0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h * self.scale)


def _loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum over unevenly many tokens of each micro-batch."""
    losses = nn.functional.cross_entropy(output.transpose(1, 2), target, ignore_index=0, reduction="sum")
    return losses, (target != 0).sum()


def orthogonality(model: nn.Module) -> Any:
    return sum(0.01 * (w.t() @ w - torch.eye(w.size(1))).square().sum() for w in model.parameters() if w.ndim == 2)


def l2_of_some(model: nn.Module) -> Any:
    """Of parameters that the first stage has alone."""
    return sum(0.1 * w.square().sum() for name, w in model.named_parameters() if name.startswith("blocks.0."))


def _made() -> Tied:
    torch.manual_seed(0)
    return Tied()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(12, (8, 5), generator=generator), torch.randint(12, (8, 5), generator=generator)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _trained(fields: dict[str, Any]) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    engine = ts.parallelize(_made(), ts.Plan(**fields), optimizer=_sgd, loss_fn=_loss)
    share = slice(engine.mesh.dp_rank, None, engine.mesh.dp_size)
    engine.add_penalty(orthogonality)
    engine.add_penalty(l2_of_some)
    removed = engine.add_penalty(lambda model: sum(w.sum() for w in model.parameters()))
    engine.step(*(part[share] for part in _batch(100)))
    removed.remove()
    removed.remove()
    anchor = {name: w.detach().clone() for name, w in _made().named_parameters()}
    engine.add_penalty(lambda model: sum((w - anchor[n]).square().sum() for n, w in model.named_parameters()))
    losses = [engine.step(*(part[share] for part in _batch(step))).item() for step in range(STEPS)]
    inputs, targets = _batch(0)
    return losses, engine.evaluate(inputs[share], targets[share]).item(), engine.full_state_dict()


def _expected(clip: float | None) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    model, anchor = _made(), {name: w.detach().clone() for name, w in _made().named_parameters()}
    optimizer, losses = _sgd(model.parameters()), []
    for step in (100, *range(STEPS)):
        inputs, targets = _batch(step)
        total, count = _loss(model(inputs), targets)
        loss = total / count + orthogonality(model) + l2_of_some(model)
        if step == 100:
            loss = loss + sum(w.sum() for w in model.parameters())
        else:
            loss = loss + sum((w - anchor[name]).square().sum() for name, w in model.named_parameters())
            losses.append(loss.item())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    total, count = _loss(model(_batch(0)[0]), _batch(0)[1])
    return losses, (total / count).item(), model.state_dict()


@pytest.mark.fast_cases("tp", "one")
@pytest.mark.parametrize("case", PLANS)
def test_penalties_are_those_of_one_process(ranks, case):
    world_size, fields = PLANS[case]
    losses, evaluated, weights = _expected(fields.get("clip_grad_norm"))
    results = ranks(world_size, _trained, fields)
    for result in results:
        torch.testing.assert_close(torch.tensor(result[0]), torch.tensor(losses), rtol=2e-5, atol=2e-5)
        assert result[1] == pytest.approx(evaluated, rel=2e-5)
    assert results[0][2].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(results[0][2][name], value, rtol=2e-5, atol=2e-5)


def _low_precision(fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = ts.parallelize(_made(), ts.Plan(**fields), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), loss_fn=_loss)
    share = slice(engine.mesh.dp_rank, None, engine.mesh.dp_size)
    if engine.scaler is not None:
        engine.scaler.scale = 1024.0  # no step overflows
    engine.add_penalty(orthogonality)
    losses = [engine.step(*(part[share] for part in _batch(step))).item() for step in range(STEPS)]
    return losses, engine.full_state_dict()


@pytest.mark.slow_cases("bf16")
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_in_16_bits_penalties_are_of_the_master_weights(ranks, precision):
    losses, weights = ranks(1, _low_precision, {})[0]
    for world_size, fields in ((1, {}), (2, dict(zero=1)), (2, dict(zero=3)), (2, dict(pp=2, micro_batches=2))):
        found = ranks(world_size, _low_precision, dict(precision=precision, **fields))[0]
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), rtol=5e-3, atol=5e-3)
        for name, value in weights.items():
            torch.testing.assert_close(found[1][name], value, rtol=5e-3, atol=5e-3)


def _distance_to_kept_parameters(fields: dict[str, Any]) -> tuple[float, float]:
    engine = ts.parallelize(_made(), ts.Plan(**fields), optimizer=_sgd, loss_fn=_loss)
    share = slice(engine.mesh.dp_rank, None, engine.mesh.dp_size)
    kept = {name: w.detach().clone() for name, w in engine.model.named_parameters()}
    engine.step(*(part[share] for part in _batch(0)))
    engine.add_penalty(lambda model: sum((w - kept[n]).square().sum() for n, w in model.named_parameters()))
    return tuple(engine.step(*(part[share] for part in _batch(step))).item() for step in (1, 2))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("zero1-clip", marks=pytest.mark.slow),
        "zero3-micro2-clip",
        "pp",
        pytest.param("pp-zero3", marks=pytest.mark.slow),
    ],
)
def test_distance_to_copies_of_the_engines_parameters(ranks, case):
    world_size, fields = PLANS[case]
    fields = {name: value for name, value in fields.items() if name != "clip_grad_norm"}
    expected = ranks(1, _distance_to_kept_parameters, {})[0]
    for found in ranks(world_size, _distance_to_kept_parameters, fields):
        assert found == pytest.approx(expected, rel=2e-5)


def _messages(fields: dict[str, Any]) -> list[str]:
    engine = ts.parallelize(_made(), ts.Plan(**fields), optimizer=_sgd, loss_fn=_loss)
    share = slice(engine.mesh.dp_rank, None, engine.mesh.dp_size)
    before = engine.full_state_dict()
    found = []
    for function in (
        lambda model: sum(w.abs() for w in model.blocks.parameters() if w.shape == (16, 8)),
        lambda model: sum(w.detach().abs().sum() for w in model.parameters()),
        lambda model: next(iter(model.parameters())).sum().item(),
        lambda model: model.scale.sum() + model.embedding.weight.sum() + model.blocks[0][0].weight.sum(),
        lambda model: model.blocks[0](torch.ones(2, 8)).sum() + model.blocks[3](torch.ones(2, 8)).sum(),
    ):
        handle = engine.add_penalty(function)
        try:
            engine.step(*(part[share] for part in _batch(0)))
            found.append("")
        except (TypeError, ValueError, RuntimeError) as error:
            found.append(str(error))
        if len(found) == 1:
            try:
                engine.backward(torch.ones((), requires_grad=True))
            except RuntimeError as error:
                found[0] += str(error)
        handle.remove()
        if not found[-1]:
            break
    else:
        after = engine.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
    try:
        engine.add_penalty(0.1)
    except TypeError as error:
        found.append(str(error))
    engine.step(*(part[share] for part in _batch(0)))
    return found


@pytest.mark.parametrize(
    "case", ["one", "zero3-micro2-clip", "pp", pytest.param("pp-interleaved", marks=pytest.mark.slow)]
)
def test_what_is_no_penalty_on_the_weights_is_refused_on_every_rank(ranks, case):
    world_size, fields = PLANS[case]
    for found in ranks(world_size, _messages, fields):
        assert "returned a tensor of shape [16, 8]; it must return a scalar" in found[0]
        assert "engine.backward(loss) was called after engine.add_penalty" in found[0]
        assert "no penalty of engine.add_penalty depends on any trained parameter" in found[1]
        assert "it must return a scalar tensor" in found[2]
        if "pp" in fields:
            assert "go over model.named_parameters()" in found[3]
            assert "on this rank: under Plan(pp=2)" in found[4] or "called a Sequential" in found[4]
        else:
            assert not found[3]
        assert "it must be a function" in found[-1]
