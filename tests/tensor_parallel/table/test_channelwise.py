"""Which modules are taken to compute channel by channel, and how their channels are split."""

import pytest
import torch
from torch import nn

from tensorshard.tensor_parallel.table.channelwise import as_channelwise, channel_layouts, keep_own_channels
from tensorshard.tensor_parallel.table.layouts import Layout


class Frozen(nn.Module):
    """A batch norm whose numbers are all buffers, as in detection models."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.size = channels
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(channels))


@pytest.mark.parametrize(
    ("module", "groups", "surely"),
    [
        (nn.BatchNorm2d(8), 8, True),
        (nn.SyncBatchNorm(8), 8, True),
        (nn.BatchNorm1d(8, affine=False, track_running_stats=False), 8, True),
        (nn.InstanceNorm3d(8), 8, True),
        (nn.GroupNorm(4, 8), 4, True),
        (nn.Conv2d(8, 8, 3, groups=8), 8, True),
        (nn.ConvTranspose1d(8, 16, 3, groups=2), 2, True),
        (nn.PReLU(8), 8, False),
        (Frozen(8), 8, False),
    ],
    ids=str,
)
def test_what_computes_by_channel(module, groups, surely):
    found = as_channelwise(module)
    assert found is not None and (found.inputs, found.groups, found.surely) == (8, groups, surely)


@pytest.mark.parametrize(
    "module",
    [nn.Conv2d(8, 8, 3), nn.Linear(8, 8), nn.ReLU(), nn.Embedding(8, 8), nn.Sequential(nn.BatchNorm2d(8)), nn.PReLU()],
    ids=str,
)
def test_what_does_not(module):
    found = as_channelwise(module)
    assert found is None or found.inputs == 1


def test_a_subclass_is_a_guess():
    class Activated(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    found = as_channelwise(Activated(8))
    assert found is not None and not found.surely


def test_layouts_name_parameters_and_running_statistics():
    layouts = channel_layouts("norm", nn.BatchNorm2d(12), 2, parts=2)
    assert layouts == dict.fromkeys(("weight", "bias", "running_mean", "running_var"), Layout(0, (6, 6)))
    assert channel_layouts("conv", nn.Conv1d(8, 16, 3, groups=4), 2) == {
        "weight": Layout(0, (16,)),
        "bias": Layout(0, (16,)),
    }


def test_counts_are_those_of_the_rank():
    norm, depthwise = nn.GroupNorm(4, 8), nn.Conv2d(7, 7, 3, groups=7)
    keep_own_channels(norm, 1, 2)
    assert (norm.num_groups, norm.num_channels) == (2, 4)
    channel_layouts("depthwise", depthwise, 2)
    keep_own_channels(depthwise, 1, 2)
    assert (depthwise.groups, depthwise.in_channels, depthwise.out_channels) == (3, 3, 3)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.GroupNorm(3, 6), "norm has 3 groups of its 6 channels, which cannot be divided over 2 ranks"),
        (nn.Conv2d(6, 6, 1, groups=3), "norm has 3 groups of its 6 channels"),
        (nn.Linear(6, 6), "norm is a Linear, which cannot be 'channels'"),
    ],
    ids=str,
)
def test_what_does_not_divide_is_refused(module, message):
    with pytest.raises(ValueError, match=message):
        channel_layouts("norm", module, 2)
