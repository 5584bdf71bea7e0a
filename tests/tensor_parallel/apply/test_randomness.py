"""Dropout under tensor parallelism: apart where activations differ, alike where they are replicated, and repeatable."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts

WIDTH, INNER, TOKENS = 8, 64, 16


class Dropping(nn.Module):
    """Drops between its layers, where features are split, and after them, where they are not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.down(self.inner(torch.relu(self.up(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Dropping() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x) * 1.0  # whole, since code reads it
        for block in self.blocks:
            x = block(x)
        return x


def _masks(fields: dict[str, Any], tokens: int = TOKENS) -> dict[str, Any]:
    """What the dropouts of two steps dropped, and the losses."""
    engine = ts.parallelize(
        Model,
        ts.Plan(**fields),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=lambda output, _: output.square().mean(),
        sample_inputs=torch.ones(2, tokens, WIDTH),  # nothing in the model itself says that it reads sequences
    )
    masks: dict[str, list[torch.Tensor]] = {}
    for name, module in engine.model.named_modules():
        if isinstance(module, nn.Dropout):
            module.forward = partial(_recorded, masks.setdefault(name, []), module.p)
    x = torch.ones(2, tokens, WIDTH)
    return {"losses": [engine.step(x, x).item() for _ in range(2)], "masks": masks}


def _recorded(masks: list[torch.Tensor], p: float, x: torch.Tensor) -> torch.Tensor:
    mask = nn.functional.dropout(torch.ones_like(x), p)
    masks.append(mask.detach())
    return x * mask


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_dropout_differs_where_activations_do_and_agrees_elsewhere(ranks, sequence_parallel):
    fields = dict(tp=2, sequence_parallel=sequence_parallel)
    first, second = ranks(2, _masks, fields)
    a, b = first["masks"], second["masks"]
    assert a["blocks.0.inner"][0].shape == (2, TOKENS, INNER // 2)
    for step in range(2):
        assert torch.equal(a["start"][step], b["start"][step])
        assert not torch.equal(a["blocks.0.inner"][step], b["blocks.0.inner"][step])
        alike = torch.equal(a["blocks.0.outer"][step], b["blocks.0.outer"][step])
        assert alike != sequence_parallel  # after the row layer each has positions of its own, or all has the same
    assert not torch.equal(a["blocks.0.inner"][0], a["blocks.0.inner"][1])
    assert not torch.equal(a["blocks.0.inner"][0], a["blocks.1.inner"][0])
    assert first["losses"] == second["losses"]
    assert ranks(2, _masks, fields)[0]["losses"] == first["losses"]  # a seed gives the same run twice


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_recomputation_drops_the_same_again(ranks, sequence_parallel):
    fields = dict(tp=2, sequence_parallel=sequence_parallel)
    kept = ranks(2, _masks, fields)
    again = ranks(2, _masks, {**fields, "recompute": "full"})
    assert again[0]["losses"] == pytest.approx(kept[0]["losses"], rel=1e-6)
    for rank in range(2):
        inner = again[rank]["masks"]["blocks.0.inner"]  # forward, and its repetition in backward, of two steps
        assert len(inner) == 4
        assert torch.equal(inner[0], inner[1]) and torch.equal(inner[0], kept[rank]["masks"]["blocks.0.inner"][0])


@pytest.mark.parametrize("more", [dict(), dict(recompute="full")], ids=str)
def test_numbers_by_rank_agree_where_values_are_replicated(ranks, more):
    fields = dict(tp=2, sequence_parallel=True, random="by_rank", **more)
    first, second = ranks(2, _masks, fields, 15)
    a, b = first["masks"], second["masks"]
    assert [a["blocks.0.outer"][0].size(1), b["blocks.0.outer"][0].size(1)] == [8, 7]
    assert all(torch.equal(*pair) for pair in zip(a["start"], b["start"], strict=True))  # after draws of unequal sizes
    assert not torch.equal(a["start"][0], a["start"][1])
    assert first["losses"] == second["losses"]
    if more:
        assert first["losses"] == pytest.approx(ranks(2, _masks, dict(fields, recompute="none"), 15)[0]["losses"])
