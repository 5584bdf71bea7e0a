"""`verify`: exact plans are found exact, planted faults are found and named, what cannot be is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorshard as ts
from injected_faults import FAULTS, Transformer, batch, planted, token_loss

ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)

PLANS: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0},
    "zero3": {"zero": 3},
    "tp": {"dp_shard": 1, "tp": 2},
    "pp": {"dp_shard": 1, "pp": 2, "micro_batches": 2},
}
# The others are tried by `python -m benchmarks museum --planted`.
CASES = (
    ("every gradient times the ranks", "zero0"),
    ("labels shifted", "zero3"),
    ("a causal mask is dropped", "tp"),
    ("norms' gradients are each rank's own", "zero0"),
    ("half of the samples twice", "pp"),
    ("a weight that stays", "zero3"),
    ("clipped once more", "zero3"),
    ("a layer's gradient is lost", "tp"),
)


class Dropping(Transformer):
    """Each block, which stages may have, and functional code drop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(block, nn.Dropout(0.2)) for block in self.blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embedding(tokens), 0.2, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _verify(plan: ts.Plan, model: Any = Transformer, **options: Any) -> ts.Verification:
    inputs, targets = batch()
    given = {"inputs": inputs, "targets": targets, "optimizer": ADAMW, "loss_fn": token_loss, **options}
    return ts.verify(model, plan, **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"zero": 3, "clip_grad_norm": 0.5}, id="zero3, clipped"),
        pytest.param({"tp": 2, "sequence_parallel": True, "dp_shard": 1}, id="tp, sequence parallel"),
        pytest.param({"pp": 2, "micro_batches": 2, "zero": 1}, id="pp, zero1"),
        pytest.param({"zero": 2, "precision": "bf16"}, id="bf16"),
        pytest.param({"zero": 3, "offload": "cpu", "recompute": "full"}, id="offload, recompute"),
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "zero": 2, "micro_batches": 2}, id="hybrid"),
    ],
)
def test_exact_plans(fields):
    found = _verify(ts.Plan(**fields), Dropping)

    assert found, found.describe()
    assert found.culprit is None and len(found.hash) == 16
    counts = found.comparison.counts
    assert counts["gradient"] and counts["state"] and counts["other"] == (2 if fields.get("precision") == "bf16" else 3)
    assert (counts["norm"] > 0) == ("clip_grad_norm" in fields)
    text = found.describe()
    assert ": exact, " in text and "gradients before clipping" in text and found.hash in text


@pytest.mark.slow
@pytest.mark.fast_cases("labels shifted-zero3")
@pytest.mark.parametrize(("fault", "plan"), [pytest.param(*case, id="-".join(case)) for case in CASES])
def test_planted_faults(fault, plan):
    plant, kind = FAULTS[fault]
    fields = {**PLANS[plan], **({"clip_grad_norm": 0.1} if kind == "norm" else {})}
    with planted(plant):
        found = _verify(ts.Plan(**fields))

    assert not found
    assert found.culprit is not None and found.culprit.kind == kind, found.describe()
    assert found.culprit.axis and f"culprit: {kind}" in found.describe()


@pytest.mark.slow
def test_the_smallest_part_of_the_plan():
    plant, _ = FAULTS["a layer's output larger"]

    def only_under_tp(engine: Any) -> None:
        if engine.plan.tp > 1:
            plant(engine)

    with planted(only_under_tp):
        found = _verify(ts.Plan(zero=1, tp=2, clip_grad_norm=1.0))

    assert found.culprit is not None and found.culprit.axis == "tp=2"
    assert found.culprit.module in {"blocks.0.up", "blocks.1.up"}
    assert {part.name: part.is_exact for part in found.parts}["without tp=2"]


@pytest.mark.slow
def test_the_page_and_the_dict(tmp_path):
    found = _verify(ts.Plan(zero=1), steps=1)

    page = found.to_html(tmp_path / "page.html").read_text()
    assert "<h1>" in page and found.hash in page and "gradients before clipping" in page
    assert found.to_dict()["exact"] is True and found.to_dict()["hash"] == found.hash
    again = _verify(ts.Plan(zero=1), steps=1)
    assert again.hash == found.hash
    assert _verify(ts.Plan(zero=2), steps=1).hash != found.hash


@pytest.mark.slow
def test_a_module_stays_as_it_was():
    model = Transformer()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    assert _verify(ts.Plan(zero=1), model, steps=1)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class OnlyAdds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


@pytest.mark.slow
def test_what_is_refused():
    with pytest.raises(ValueError, match="nothing of this OnlyAdds can be split over 2 ranks"):
        _verify(
            ts.Plan(tp=2), OnlyAdds, inputs=torch.ones(4, 4), targets=torch.ones(4, 4), loss_fn=nn.functional.mse_loss
        )
    with pytest.raises(TypeError, match=r"plan is a dict; it must be a tensorshard\.Plan"):
        _verify({"zero": 3})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiply to 4, but the number of processes is 3"):
        _verify(ts.Plan(tp=2, dp_shard=2), world_size=3)
    with pytest.raises(ValueError, match="steps is 0; it must be a number from 1 on"):
        _verify(ts.Plan(zero=1), steps=0)
