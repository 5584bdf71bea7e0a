"""Which blocks make random numbers in training: told by running them, whatever their dropout is called."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensorshard.tensor_parallel.search.choose_table import choose_tensor_table
from tensorshard.tensor_parallel.verify.model_run import blocks_without_random_numbers, find_units, run_once


class Mlp(nn.Module):
    """Functional dropout, at a rate whose name says nothing."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.rate = rate
        self.drop_path = 0.5  # which nothing uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(torch.relu(self.up(x))), self.rate, self.training)


class Attention(Mlp):
    """Drops attention's weights inside of a fused kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).unflatten(-1, (4, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.rate if self.training else 0.0)
        return x + self.down(mixed.transpose(1, 2).flatten(2))


class OfTorch(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    "make",
    [
        Mlp,
        Attention,
        lambda rate: OfTorch(8, 2, dropout=rate, batch_first=True),
        lambda rate: nn.TransformerEncoderLayer(8, 2, 16, dropout=rate, batch_first=True),
        lambda rate: nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate), nn.Linear(8, 8)),
        lambda rate: nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(rate), nn.Linear(8, 8)),
    ],
)
def test_what_runs_is_what_counts(make):
    model = nn.Sequential(make(0.0), make(0.3), make(0.0).eval(), make(0.3).eval())  # training is what counts
    units = dict(model.named_children())
    run = run_once(model, list(units), torch.zeros(2, 3, 8))
    assert blocks_without_random_numbers(units, run) == {"0", "2"}


def _not_random(*blocks: nn.Module, table: Any = None, **options: Any) -> frozenset[str]:
    model = nn.Sequential(*blocks)
    assert set(find_units(model)) == {str(index) for index in range(len(blocks))}
    return choose_tensor_table(model, 2, table, inputs=torch.zeros(2, 3, 8), **options).not_random


def test_a_table_says_which_blocks_are_not_random():
    table = {"*.up": "colwise", "*.down": "rowwise"}
    assert _not_random(Mlp(0.0), Mlp(0.3)) == {"0"}
    assert _not_random(Mlp(0.0), Mlp(0.3), table=table) == {"0"}
    assert _not_random(Mlp(0.0), Mlp(0.0), table=table, check=False) == frozenset()  # nobody looked
