"""Buffers that a forward changes are changed once a step, whether or not blocks are recomputed."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Remembering(nn.Module):
    """A counter, an average that is replaced, a codebook that the output depends on, statistics, a late buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("average", torch.zeros(16), persistent=False)  # of a rank's own samples
        self.register_buffer("codebook", torch.randn(5, 8), persistent=False)
        self.register_buffer("late", None)
        self.register_buffer("table", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.up(x)))
        if self.training:
            self.calls += 1
            self.average = self.average * 0.9 + 0.1 * h.detach().float().mean(0)
            self.late = torch.ones(2) if self.late is None else self.late + 1
        nearest = torch.cdist(x.float(), self.codebook).argmin(1)
        quantized = x * self.codebook[nearest] * self.calls.cos() * self.late.sum().sin()
        if self.training:
            self.codebook = self.codebook.lerp(x.detach().float().mean(0).expand(5, 8), 0.3)
        return x + self.down(h) + quantized * self.table.sum()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList([Remembering(), Remembering()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _train(fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], list[torch.Tensor]]:
    model = Counting()
    # Micro-batches move the codebook one after the other, in a plain loop, too.
    engine = ts.parallelize(
        model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=nn.functional.mse_loss, check_samples=False
    )
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = [torch.randn(8, 8, generator=generator) for _ in range(2)]
        mine = [t.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for t in batch]
        losses.append(engine.step(*mine).item())
    late = [block.late for block in model.blocks] if engine.plan.pp == 1 else []
    own = {name: b for name, b in model.named_buffers() if "average" in name or "codebook" in name}
    return losses, engine.full_state_dict() | own, late


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    "fields",
    [dict(zero=0), dict(zero=2, micro_batches=2), dict(zero=3, micro_batches=2), dict(zero=0, precision="bf16")],
    ids=str,
)
def test_the_same_as_without_recomputation(ranks, fields, mode):
    expected = ranks(2, _train, fields)
    found = ranks(2, _train, dict(fields, recompute=mode))
    for (losses, state, late), (other_losses, other_state, other_late) in zip(found, expected, strict=True):
        assert losses == other_losses
        assert list(state) == list(other_state)
        for name, value in state.items():
            assert torch.equal(value, other_state[name]), name
        micro_batches = fields.get("micro_batches", 1)
        for value, other in zip(late, other_late, strict=True):
            assert torch.equal(value, other) and value[0] == 3 * micro_batches
    assert found[0][1]["blocks.0.calls"] == 3 * fields.get("micro_batches", 1)
