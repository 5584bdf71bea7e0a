"""Large blocks are checked with matrices that share their random numbers: in little memory, and mistakes show."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensorshard.model import fake_copies
from tensorshard.tensor_parallel.table.layouts import shard_view
from tensorshard.tensor_parallel.table.styles import parse_style
from tensorshard.tensor_parallel.verify import block_check
from tensorshard.tensor_parallel.verify.block_calls import as_call
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.comparison import MismatchError

WIDTH, HIDDEN = 1024, 2048


class Gated(nn.Module):
    """Three matrices of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def _check(monkeypatch: pytest.MonkeyPatch) -> BlockCheck:
    monkeypatch.setattr(block_check, "_LARGE", 1 << 20)
    return BlockCheck(Gated().to("meta"), as_call(torch.randn(2, WIDTH)), 2)


def test_they_take_the_memory_of_the_largest_and_differ(monkeypatch):
    weights = list(_check(monkeypatch)._block.parameters())
    held = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    assert sum(held.values()) < 1.1 * weights[0].nbytes
    gate, up, _ = weights
    assert all(weight.is_contiguous() for weight in weights)
    assert (gate == up).float().mean() < 0.01


def test_a_right_table_passes_and_a_wrong_one_does_not(monkeypatch):
    check = _check(monkeypatch)
    right = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    check.check({name: parse_style(style) for name, style in right.items()})
    with pytest.raises(MismatchError):
        check.check({"gate": parse_style("colwise"), "up": parse_style("colwise")})


class Flat(Gated):
    """One whose code takes the last weight in one piece."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        result: torch.Tensor = F.linear(hidden, self.down.weight.view(-1).view(WIDTH, -1))
        return result


def test_ranks_take_columns_from_the_full_matrix_unless_code_needs_them_in_one_piece(monkeypatch):
    monkeypatch.setattr(block_check, "_LARGE", 1 << 20)
    right = {"gate": "colwise", "up": "colwise", "down": "slice(1)"}
    seen: list[bool] = []

    def note(full: torch.Tensor, *args: object, apart: bool) -> torch.Tensor:
        seen.append(apart)
        return shard_view(full, *args, apart=apart)  # type: ignore[arg-type]

    monkeypatch.setattr(block_check, "shard_view", note)
    _check(monkeypatch).check({name: parse_style(style) for name, style in (right | {"down": "rowwise"}).items()})
    assert all(seen)
    seen.clear()
    whole = BlockCheck(Flat().to("meta"), as_call(torch.randn(2, WIDTH)), 2)
    with pytest.raises(MismatchError):  # nobody adds the parts up
        whole.check({"gate": parse_style("colwise"), "up": parse_style("colwise"), "down": parse_style("slice(1)")})
    assert any(seen) and not all(seen)


class Reshaped(Gated):
    """One whose code needs all of the hidden features, and says so in a reshape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        result: torch.Tensor = self.down(hidden.reshape(-1, HIDDEN))
        return result


def test_no_copies_are_made_because_sizes_do_not_suit(monkeypatch):
    monkeypatch.setattr(block_check, "_LARGE", 1 << 20)
    check = BlockCheck(Reshaped().to("meta"), as_call(torch.randn(3, WIDTH)), 2)
    right = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    with pytest.raises(MismatchError, match="is invalid for input of size"):
        check.check({name: parse_style(style) for name, style in right.items()})
    assert check._views


def test_random_numbers_that_are_repeated_make_no_two_rows_or_columns_alike(monkeypatch):
    monkeypatch.setattr(fake_copies, "_POOL_PERIOD", 65_537)
    gate, up, down = _check(monkeypatch)._block.parameters()
    assert torch.equal(gate.flatten()[:1000], gate.flatten()[65_537:66_537])
    for one in (gate, up, down):
        for rows in (one, one.T):
            distances = torch.cdist(rows[:64].contiguous(), rows.contiguous())
            assert distances.fill_diagonal_(1e9).min() > 0.5 * distances[0, 1]
