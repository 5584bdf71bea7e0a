"""Losses of all samples: those of one process under every plan, and in an epoch's last batch."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import parity
import tensorshard as ts
from toys import Regular

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def _whole(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A supervised contrastive loss of all pairs (Khosla et al. 2020)."""
    features = F.normalize(features, dim=1)
    scores = (features @ features.T / 0.5).masked_fill(torch.eye(len(features), dtype=torch.bool), -torch.inf)
    same = (labels[:, None] == labels).float().fill_diagonal_(0)
    logs = scores.log_softmax(1).masked_fill(torch.eye(len(features), dtype=torch.bool), 0)
    return -(same * logs).sum() / same.sum().clamp(min=1)


def _loss(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _whole(ts.gather_samples(features), ts.gather_samples(labels))


def _loss_with_model(model: Any, batch: Any) -> dict[str, Any]:
    return {"all": _loss(model(batch[0]), batch[1]), "size": ts.LossTerm(model(batch[0]).square().mean(), 0.1)}


LOSSES = {"output": _loss, "model": _loss_with_model}


def _dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(13, 6, generator=generator), torch.randint(3, (13,), generator=generator))


def _train(kind: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=SGD, loss_fn=LOSSES[kind], seed=1)
    losses = []
    for _ in range(3):
        for batch in engine.loader(_dataset(), 4, name=f"epoch{len(losses)}"):  # the last has one sample
            losses += [engine.evaluate(*batch).item(), engine.step(*batch).item()]
    return losses, engine.full_state_dict()


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, dict(zero=3)),
    "zero1": (4, dict(zero=1)),
    "tp": (4, dict(tp=2)),
    "hybrid": (4, dict(dp_replicate=2, zero=3, recompute="full")),
    "pp": (4, dict(pp=2, zero=1, pp_schedule="gpipe")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("plan", PLANS)
def test_every_sample_is_compared_with_all(ranks, plan, kind):
    size, fields = PLANS[plan]
    if kind == "model" and "pp" in fields:
        pytest.skip("refused: no rank of a pipeline has all of the model")
    expected, state = ranks(1, _train, kind, dict(zero=0))[0]
    assert len(expected) == 24
    for losses, _ in (found := ranks(size, _train, kind, fields)):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    parity.assert_same_state(found[0][1], state, 1e-5)


def _by_hand(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = ts.parallelize(Regular(), ts.Plan(**fields), optimizer=SGD, loss_fn=_loss)
    mesh = engine.mesh
    for step in range(4):
        x, labels = _dataset()[3 * step : 3 * step + 3]
        share = slice(mesh.dp_rank * 2, mesh.dp_rank * 2 + 2) if mesh.dp_size > 1 else slice(None)  # 2 and 1
        features = ts.gather_samples(engine.model(x[share]), mesh)
        engine.backward(_whole(features, labels))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return engine.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(zero=3), pytest.param(dict(zero=0), marks=pytest.mark.slow)], ids=str)
def test_a_loop_of_ones_own_takes_ranks_of_different_sizes(ranks, fields):
    expected = ranks(1, _by_hand, dict(zero=0))[0]
    parity.assert_same_state(ranks(2, _by_hand, fields)[0], expected, 1e-5)


def _refusals() -> list[str]:
    found = []
    x, labels = _dataset()[:4]
    with pytest.raises(RuntimeError) as outside:
        ts.gather_samples(x)
    with pytest.raises(ValueError) as scalar:
        ts.gather_samples(x.sum())
    for kind, loss_fn in LOSSES.items():
        engine = ts.parallelize(Regular(), ts.Plan(micro_batches=2), optimizer=SGD, loss_fn=loss_fn)
        with pytest.raises(ValueError) as micro:
            engine.step(x, labels)
        engine.evaluate(x, labels)  # in one part
        found.append(f"{kind}: {micro.value}")
    return [str(outside.value), str(scalar.value), *found]


@pytest.mark.slow
def test_what_it_cannot_do_says_so(ranks):
    words = ("gather_samples(tensor, engine.mesh)", "losses of reduction='none'", "output: ", "model: ")
    for found in ranks(2, _refusals):
        assert all(word in sentence for word, sentence in zip(words, found, strict=True))
        assert all("under micro_batches=2" in sentence for sentence in found[2:])


class Compares(nn.Module):
    """A forward that compares its samples with those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inlet, self.dropout, self.outlet = nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.dropout(self.inlet(x))
        return self.outlet(features - ts.gather_samples(features).mean(0))


def _compared(fields: dict[str, Any]) -> list[float]:
    sample = torch.randn(4, 6)
    engine = ts.parallelize(
        Compares, ts.Plan(**fields), optimizer=SGD, loss_fn=F.cross_entropy, seed=1, sample_inputs=sample
    )
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)
        losses.append(engine.step(*parity.shard(engine, *batch)).item())
    return losses


@pytest.mark.slow
def test_forwards_that_gather_samples(ranks):
    expected = ranks(1, _compared, dict(zero=0))[0]
    for fields in (dict(zero=1), dict(zero=3), dict(tp=2), dict(pp=2, micro_batches=1, pp_schedule="gpipe")):
        assert ranks(2, _compared, fields)[0] == pytest.approx(expected, rel=1e-5)
