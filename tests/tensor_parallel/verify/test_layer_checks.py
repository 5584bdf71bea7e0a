"""Modules of classes of their own compute channel by channel, or do not, in training too."""

import pytest
import torch
from torch import nn

from tensorshard.tensor_parallel.verify.layer_checks import computes_by_channel


class Activated(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.activation = nn.SiLU()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.activation(super().forward(input))


class MixesInTraining(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input - input.mean(1, keepdim=True) if self.training else input)


class MixesStatistics(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        if self.training:
            self.running_mean.fill_(self.running_mean.mean())
        return output


class Scaled(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.scale[:, None, None]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm3d(8), True),
        (nn.PReLU(8), True),
        (Activated(8), True),
        (Scaled(8), True),
        (MixesInTraining(8), False),
        (MixesStatistics(8), False),
        (nn.LayerNorm(8), False),
        (nn.RMSNorm(8), False),
        (nn.Conv2d(8, 8, 1), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_computes_by_channel(module, expected):
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert computes_by_channel(module, 2) is expected
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
