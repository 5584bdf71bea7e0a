"""Which layers tensor parallelism takes for linear ones, embeddings, attentions and modules of separate channels."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tensorshard.model.blocks import is_transposed
from tensorshard.model.forwards import Role, wrap_forward
from tensorshard.tensor_parallel.table.layer_kinds import (
    as_channelwise,
    as_splittable,
    channel_layouts,
    is_multihead_attention,
    keep_own_channels,
    named_arguments,
    signature_of,
)
from tensorshard.tensor_parallel.table.layouts import Layout


class Named(nn.Linear):
    """A subclass that computes as its base class does."""


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens):
        return 2 * super().forward(tokens)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class Conv1D(nn.Module):
    """It has the name and the attributes of GPT-2's layer, and computes something else."""

    def __init__(self):
        super().__init__()
        self.nf = 3
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.sin(x @ self.weight) + self.bias


def _with_a_forward_of_its_own(module):
    own = module.forward
    module.forward = lambda x: 2 * own(x)
    return module


@pytest.mark.parametrize("layer", [nn.Linear(2, 3), Named(2, 3), nn.Embedding(2, 3)], ids=repr)
def test_layers_that_compute_as_torchs_do(layer):
    found = as_splittable(layer)
    assert found is not None and {found.inputs, found.outputs} == {2, 3} and not found.own_forward


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scaled(2, 3),
        lambda: ScaledEmbedding(2, 3),
        lambda: _with_a_forward_of_its_own(nn.Linear(2, 3)),
        lambda: _with_a_forward_of_its_own(nn.Embedding(2, 3)),
    ],
)
def test_layers_whose_own_forward_is_kept(make):
    found = as_splittable(make())
    assert found is not None and {found.inputs, found.outputs} == {2, 3} and found.own_forward


class Adapted(nn.Linear):
    """It has more than a weight and a bias, so that nothing is known of what it computes."""

    def __init__(self):
        super().__init__(2, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize(
    "make",
    [
        Adapted,
        Conv1D,
        lambda: parametrizations.spectral_norm(nn.Linear(2, 3)),
        lambda: nn.utils.spectral_norm(nn.Linear(2, 3)),
    ],
)
def test_other_modules_and_layers_whose_weight_is_computed(make):
    assert as_splittable(make()) is None


def test_gpt2s_layer_is_known_by_what_it_computes():
    from transformers.pytorch_utils import Conv1D as Transposed

    class Subclass(Transposed):
        pass

    class Other(Transposed):
        def forward(self, x):
            return 2 * super().forward(x)

    for layer in (Transposed(3, 2), Subclass(3, 2)):
        assert is_transposed(layer)
        found = as_splittable(layer)
        assert found is not None and (found.inputs, found.outputs, found.input_dim) == (2, 3, 0)
    assert as_splittable(Other(3, 2)) is None
    assert as_splittable(_with_a_forward_of_its_own(Transposed(3, 2))) is None


def test_attentions():
    assert is_multihead_attention(nn.MultiheadAttention(4, 2))
    assert is_multihead_attention(nn.MultiheadAttention(4, 2, kdim=3, bias=False))
    assert not is_multihead_attention(SelfAttention(4, 2))
    assert not is_multihead_attention(_with_a_forward_of_its_own(nn.MultiheadAttention(4, 2)))
    assert not is_multihead_attention(parametrizations.weight_norm(nn.MultiheadAttention(4, 2), "in_proj_weight"))


def test_a_signature_is_that_of_the_modules_own_forward():
    layer = Scaled(2, 3)
    wrap_forward(layer, Role.RECOMPUTATION, lambda forward, /, *args, **kwargs: forward(*args, **kwargs))
    assert list(signature_of(layer).parameters) == ["x"]
    layer = nn.Linear(2, 3)
    layer.forward = lambda tokens, scale=1: tokens
    assert list(named_arguments(layer, (5,), {})) == ["tokens"]


# -- modules that compute channel by channel --


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
