"""Which layers tensor parallelism takes for linear ones, embeddings and attentions: those that compute as these do."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tensorshard.model.forwards import Role, wrap_forward
from tensorshard.tensor_parallel.table.layer_kinds import (
    as_splittable,
    is_multihead_attention,
    is_transposed,
    named_arguments,
    signature_of,
)


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
