"""Which ways to split a region the search passes over, and that it still finds those that need several attributes."""

import torch
from torch import nn

from tensorshard.tensor_parallel.search.block_search import Progress
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.search.proposals import Proposal
from tensorshard.tensor_parallel.table.layer_styles import PackedColwise
from tensorshard.tensor_parallel.table.styles import COLWISE, ROWWISE, Divide
from tensorshard.tensor_parallel.verify.block_calls import as_call
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.block_checks import KnownModules, inner_check
from tensorshard.tensor_parallel.verify.comparison import MismatchError


def way(*attributes: str) -> Proposal:
    divided = {"": Divide(attributes)} if attributes else {}
    return Proposal({"up": COLWISE, **divided}, {})


def ended(operations: int, message: str, amount: float = 0.0) -> MismatchError:
    return MismatchError(message, amount, in_operation=amount == 0.0, operations=operations)


def test_what_got_no_further_is_not_tried_with_more():
    progress = Progress()
    progress.note(way(), ended(5, "shapes"))
    progress.note(way("heads"), ended(7, "shapes"))
    progress.note(way("window"), ended(5, "shapes"))
    progress.note(way("width"), ended(2, "shapes"))
    assert progress.is_worth_trying(way("heads", "window"))
    assert not progress.is_worth_trying(way("window", "width"))
    progress.note(way("heads", "window"), ended(7, "shapes"))
    assert progress.is_worth_trying(way("heads", "width"))
    progress.note(way("heads", "width"), ended(7, "other shapes"))
    assert progress.is_worth_trying(way("heads", "width", "window"))
    packed = {**way("window", "width").styles, "up": PackedColwise((3,))}
    assert progress.is_worth_trying(Proposal(packed, {}))


def test_numbers_that_differ_by_another_amount_count_as_further():
    progress = Progress()
    progress.note(way(), ended(9, "differs by 50%", 0.501))
    progress.note(way("heads"), ended(9, "differs by 50%", 0.501))
    progress.note(way("window"), ended(9, "differs by 50%", 0.502))
    progress.note(way("width"), ended(9, "differs by 50%", 0.501))
    progress.note(way("keys"), ended(4, "shapes"))
    assert progress.is_worth_trying(way("window", "width"))
    assert progress.is_worth_trying(way("keys", "width"))
    assert not progress.is_worth_trying(way("heads", "width"))


class Attention(nn.Module):
    """Two numbers have to be divided together; others only look as if they had to."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.width = 4, 2, 4
        self.rounds, self.steps, self.depth = 2, 4, 64
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.rounds * self.steps / self.depth
        q = self.q(x).unflatten(-1, (self.queries, self.width)).transpose(-3, -2)
        k, v = (layer(x).unflatten(-1, (self.keys, self.width)).transpose(-3, -2) for layer in (self.k, self.v))
        k, v = (t.repeat_interleave(self.queries // self.keys, -3) for t in (k, v))
        return self.out(((q * scale) @ k.transpose(-2, -1) @ v).transpose(-3, -2).flatten(-2))


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.groups = 4
        self.attention = Attention()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x.unflatten(-1, (self.groups, -1)).flatten(-2))
        return x + self.down(self.up(x).relu())


def test_a_module_in_blocks_of_two_kinds_is_tried_once(monkeypatch):
    tried: list[type] = []
    check = BlockCheck.check

    def noted(self, *args, **kwargs):
        tried.append(type(self.make_copy()))
        return check(self, *args, **kwargs)

    monkeypatch.setattr(BlockCheck, "check", noted)
    counts = []
    for hidden in (32, 48):  # the second has blocks of two kinds
        tried.clear()
        model = nn.Sequential(nn.Linear(8, 8), Block(32), Block(hidden))
        found = find_tensor_plan(model, 2, inputs=torch.zeros(2, 3, 8)).plan.to_dict()
        assert found["*.attention.out"] == "rowwise"
        counts.append(tried.count(Attention))
    assert counts[0] == counts[1] > 0


def test_what_a_block_does_before_a_module_is_called_counts():
    """Dividing ``groups`` changes the call; dividing it away makes the run fail before."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.groups, self.unread, self.inner = 4, 4, Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.view(*x.shape[:-1], self.groups, 2).flatten(-2))

    checked = BlockCheck(Outer(), as_call(torch.zeros(2, 3, 8)), 2)
    inner = inner_check(checked, ["inner.q", "inner.out"], KnownModules())
    assert inner is not None
    right = dict.fromkeys(("inner.q", "inner.k", "inner.v"), COLWISE) | {
        "inner.out": ROWWISE,
        "inner": Divide(("queries", "keys")),
    }
    inner.check(right)
    inner.check({**right, "": Divide(("unread",))})
    for wrong in ({"": Divide(("groups",))}, {"inner": Divide(("queries",))}):
        try:
            inner.check({**right, **wrong})
        except MismatchError as error:
            assert "it does not run" in str(error)
        else:
            raise AssertionError(f"{wrong} was not refused")
