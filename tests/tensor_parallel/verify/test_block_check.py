"""What the check of a block takes for a split that does not work, and what it does not."""

import pytest
import torch
from torch import nn

from raised_errors import BY_VALUES, OTHERS, OURS, raising
from tensorshard.model import provenance
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.styles import COLWISE, ROWWISE, Divide, PackedColwise
from tensorshard.tensor_parallel.verify import block_check
from tensorshard.tensor_parallel.verify.block_calls import as_call
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.comparison import MismatchError

SPLIT = {"up": COLWISE, "down": ROWWISE, "": Divide(("heads",))}


class Keyed(nn.Module):
    """Looks up what it does by the number of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scales = {4: 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) * self.scales[self.heads])


def check() -> BlockCheck:
    return BlockCheck(Keyed(), as_call(torch.zeros(2, 8)), 2)


def test_errors_of_the_blocks_code_mean_that_it_cannot_be_split_so():
    with pytest.raises(MismatchError, match="it does not run: KeyError: 2"):
        check().check(SPLIT)


@pytest.mark.parametrize("error", OTHERS)
def test_errors_of_this_package_surface(monkeypatch, error):
    checked = check()
    monkeypatch.setattr(block_check, "apply_tensor_parallel", raising(error, OURS))
    with pytest.raises(error, match="here"):
        checked.check(SPLIT)


@pytest.mark.parametrize("error", BY_VALUES)
def test_styles_that_cannot_be_applied_are_told_by_values(monkeypatch, error):
    checked = check()
    monkeypatch.setattr(block_check, "apply_tensor_parallel", raising(error, OURS))
    with pytest.raises(MismatchError, match=f"it does not run: {error.__name__}: here"):
        checked.check(SPLIT)


@pytest.mark.parametrize("error", OTHERS)
def test_errors_of_this_package_surface_from_a_search(monkeypatch, error):
    model = nn.Sequential(Keyed(), Keyed())
    with monkeypatch.context() as patched:
        patched.setattr(block_check, "apply_tensor_parallel", raising(error, OURS))
        with pytest.raises(error, match="here"):
            find_tensor_plan(model, 2, inputs=torch.zeros(2, 8))
    monkeypatch.setattr(provenance.Provenance, "add", raising(error, OURS))
    with pytest.raises(error, match="here"):
        find_tensor_plan(model, 2)


class Scaled(nn.Module):
    """Divides by a statistic of its hidden features, and multiplies by it again."""

    def __init__(self, statistic: str) -> None:
        super().__init__()
        self.statistic = statistic
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        with torch.set_grad_enabled(self.statistic != "for a log"):
            scale = hidden.abs().max() if self.statistic != "of each" else hidden.abs().amax((0, 1), keepdim=True)
        if self.statistic == "for a log":
            return self.down(hidden)
        return self.down((hidden / scale) * scale)


@pytest.mark.parametrize("statistic", ["of all", "of each", "for a log"])
def test_a_statistic_of_a_part_is_refused_even_if_numbers_agree(statistic):
    checked = BlockCheck(Scaled(statistic), as_call(torch.zeros(2, 3, 8)), 2)
    if statistic != "of all":
        checked.check({"up": COLWISE, "down": ROWWISE})
        return
    with pytest.raises(MismatchError, match="takes the max over a dimension of which each rank has a part"):
        checked.check({"up": COLWISE, "down": ROWWISE})


class Attends(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = 2, fused
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.mT).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fused", [False, True])
def test_attention_to_a_single_key_shows_nothing(fused):
    wrong = {"qkv": PackedColwise((3,)), "out": ROWWISE}  # each head of a rank would have parts of two
    with pytest.raises(MismatchError, match="its attention has a single key on these inputs"):
        BlockCheck(Attends(fused), as_call(torch.zeros(2, 1, 8)), 2).check(wrong)
    with pytest.raises(MismatchError, match="differs by"):
        BlockCheck(Attends(fused), as_call(torch.zeros(2, 3, 8)), 2).check(wrong)
    BlockCheck(Attends(fused), as_call(torch.zeros(2, 3, 8)), 2).check({**wrong, "": Divide(("heads",))})
