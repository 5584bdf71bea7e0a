"""Which layers of convolutional blocks are paired, what is between them, and what gathers its output."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensorshard.tensor_parallel.search.find_table import find_tensor_plan


class ChannelsLast(nn.LayerNorm):
    """A layer norm over the channels, which it mixes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(12, 12, 3, 1, 1), norm, nn.Conv2d(12, 12, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.relu(self.norm(self.first(x))))


class Gated(nn.Module):
    """Restormer's feed-forward: two halves in one convolution, and one by channel behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(12, 48, 1), nn.Conv2d(24, 12, 1)
        self.depthwise = nn.Conv2d(48, 48, 3, 1, 1, groups=48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, gates = self.depthwise(self.first(x)).chunk(2, 1)
        return x + self.second(values * F.gelu(gates))


class Branches(nn.Module):
    """Two branches, concatenated along the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(12, 8, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(12, 8, 1)
        self.joined = nn.Conv2d(16, 12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = self.second(F.relu(self.first(x))), self.third(x)
        return x + self.joined(F.relu(torch.cat(branches, 1)))


PAIRED = {"first": "colwise", "second": "rowwise"}
GATHERED = {"first": "colwise_gather", "second": "colwise_gather"}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (lambda: Normed(nn.BatchNorm2d(12)), PAIRED | {"norm": "channels"}),
        (lambda: Normed(nn.InstanceNorm2d(12)), PAIRED | {"norm": "channels"}),
        (lambda: Normed(nn.GroupNorm(4, 12)), PAIRED | {"norm": "channels"}),
        (lambda: Normed(nn.PReLU(12)), PAIRED | {"norm": "channels"}),
        (lambda: Normed(nn.Conv2d(12, 12, 3, 1, 1, groups=6)), PAIRED | {"norm": "channels"}),
        (lambda: Normed(nn.AvgPool2d(3, 1, 1)), PAIRED),
        (lambda: Normed(nn.GroupNorm(3, 12)), GATHERED),
        (lambda: Normed(nn.GroupNorm(1, 12)), GATHERED),
        (lambda: Normed(ChannelsLast(12)), GATHERED),
        (Gated, {"first": "packed_colwise(2)", "depthwise": "channels(2)", "second": "rowwise"}),
        (Branches, PAIRED | {"third": "colwise_gather", "joined": "colwise_gather"}),
    ],
    ids=[
        "batch",
        "instance",
        "groups",
        "prelu",
        "grouped",
        "pool",
        "odd-groups",
        "one-group",
        "layer",
        "gated",
        "branches",
    ],
)
def test_blocks(block, expected):
    model = nn.Sequential(block(), block())
    found = find_tensor_plan(model, 2, inputs=torch.zeros(2, 12, 8, 8))
    styles = {name: str(style) for name, style in found.plan.resolve(model).items()}
    assert styles == {f"{index}.{name}": style for index in range(2) for name, style in expected.items()}


def test_channels_that_are_flattened_go_into_a_row():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 24),
        nn.ReLU(),
        nn.Linear(24, 8),
    )
    found = find_tensor_plan(model, 4, inputs=torch.zeros(2, 3, 8, 8))
    assert found.plan.to_dict() == {"0": "colwise", "4": "rowwise", "6": "colwise_gather"}


def test_columns_keep_what_was_split_already():
    """Once the first of a chain has no partner, the second is not paired with a layer that others need."""
    transposed = [nn.ConvTranspose2d(8, 16, 2, 2), nn.ReLU(), nn.ConvTranspose2d(16, 16, 2, 2), nn.ReLU()]
    start = [nn.Linear(12, 32), nn.LayerNorm(32), nn.Unflatten(1, (8, 2, 2))]
    model = nn.Sequential(*start, *transposed, nn.ConvTranspose2d(16, 3, 2, 2))
    found = find_tensor_plan(model, 2, inputs=torch.zeros(2, 12))
    assert found.plan.to_dict() == {"0": "colwise_gather", "3": "colwise_gather", "5": "colwise", "7": "rowwise"}


def test_features_that_become_channels_stay_split():
    """The reshape asks for all of them, and gets a rank's."""
    transposed = [nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, 2)]
    model = nn.Sequential(nn.Linear(12, 32), nn.Unflatten(1, (8, 2, 2)), *transposed)
    found = find_tensor_plan(model, 2, inputs=torch.zeros(2, 12))
    assert found.plan.to_dict() == {"": "divide(reshape.sizes)", "0": "colwise", "3": "rowwise"}


def test_what_is_guessed_of_volumes_and_sounds():
    for convolution in (nn.Conv1d, nn.Conv3d):
        model = nn.Sequential(convolution(2, 8, 3), nn.ReLU(), convolution(8, 4, 3))
        assert find_tensor_plan(model, 2).plan.to_dict() == {"0": "colwise", "2": "rowwise"}
