"""The check of a model around its blocks: in little memory, and with full matrices where these are needed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from peak_memory import in_a_new_process, peak_memory_of
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.styles import parse_style
from tensorshard.tensor_parallel.verify.comparison import MismatchError
from tensorshard.tensor_parallel.verify.model_check import ModelCheck

VOCABULARY, WIDTH, HIDDEN = 4096, 256, 4096


class Gated(nn.Module):
    """A gate and what it gates are halves of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        gate, up = self.up(x).chunk(2, -1)
        logits: torch.Tensor = self.head(x + self.down(F.silu(gate) * up))
        return logits


class InOnePiece(nn.Linear):
    """Takes its weight as one row of numbers, which one whose rows overlap in memory is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.view(-1).view(self.weight.shape), self.bias)


def checked(model: nn.Module, **styles: str) -> ModelCheck:
    check = ModelCheck(model.to("meta"), torch.arange(12).view(2, 6), 2)
    table: dict[str, Style] = {name: parse_style(style) for name, style in styles.items()}
    check.check(table, {})
    return check


RIGHT = {"embed": "vocab", "up": f"packed_colwise({HIDDEN},{HIDDEN})", "down": "rowwise", "head": "colwise_gather"}


def test_large_matrices_are_compact():
    check = checked(Gated(), **RIGHT)
    assert check._made is not None and check._made.is_compact
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in check._made._block.parameters()}
    assert sum(held.values()) < sum(p.nbytes for p in check._made._block.parameters()) / 3


@pytest.mark.parametrize("wrong", [{"up": "colwise"}, {"up": f"packed_colwise({HIDDEN // 2},{HIDDEN * 3 // 2})"}])
def test_mistakes_show(wrong):
    with pytest.raises(MismatchError):
        checked(Gated(), **{**RIGHT, **wrong})


def test_a_layer_that_needs_a_full_matrix_gets_one():
    model = Gated()
    model.head = InOnePiece(WIDTH, VOCABULARY, bias=False)
    check = checked(model, **{**RIGHT, "head": "replicate"})
    assert check._made is not None and not check._made.is_compact


_LARGEST = 64 << 20


def _memory_of_a_search() -> int:
    def table(rows: int) -> nn.Module:
        with torch.device("meta"):
            blocks = [nn.TransformerEncoderLayer(256, 4, 512, batch_first=True) for _ in range(3)]
            return nn.Sequential(nn.Embedding(rows, 256), *blocks, nn.Linear(256, rows, bias=False))

    find_tensor_plan(table(_LARGEST // 4096), 2)  # so that what is imported and kept is there
    return peak_memory_of(lambda: find_tensor_plan(table(_LARGEST // 1024), 2))


@pytest.mark.slow
def test_a_search_takes_little_more_than_the_largest_tensor():
    assert in_a_new_process(_memory_of_a_search) < 1.7 * _LARGEST  # the two tables alone would take 2
