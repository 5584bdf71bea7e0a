"""What the search makes of output layers without blocks around, and of heads that the ranks cannot share evenly."""

import pytest
import torch
from torch import nn

import parity
from table_models import build
from tensorshard.models import GPT
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_output_layer_of_many_classes_is_split(device):
    with torch.device(device):
        model = parity.build("resnet_37")
    found = find_tensor_plan(model, 4)
    assert found.plan.to_dict()["classifier.1"] == "colwise_gather"
    assert "classifier.1" not in found.whole


def test_an_output_layer_of_few_classes_is_not():
    found = find_tensor_plan(parity.build("resnet"), 2)
    assert "classifier.1" not in found.plan.to_dict()
    assert "not an output layer larger than its input" in found.whole["classifier.*"]


class Recurrent(nn.Module):
    """A language model without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 16)
        self.recurrent = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 101)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


def test_the_vocabulary_of_a_model_without_blocks_is_split():
    assert find_tensor_plan(Recurrent()).plan.to_dict() == {
        "embedding": "vocab",
        "head": "colwise_gather",
        "recurrent.weight_ih_l0": "gather(0)",
        "recurrent.weight_hh_l0": "gather(0)",
    }


def test_heads_that_do_not_divide_are_named_with_what_would():
    reason = find_tensor_plan(GPT(61, 16, 2, 2, 32), 4).alone["blocks.*.attention.query"]
    said = "attention.key, attention.query, attention.value have 2 heads"
    assert f"{said}, which cannot be divided over 4 ranks; tp can be 2" in reason


def test_other_sizes_that_would_divide_are_all_told():
    reason = find_tensor_plan(GPT(61, 16, 2, 6, 36), 4).alone["blocks.*.attention.query"]
    assert "have 6 heads, which cannot be divided over 4 ranks; tp can be 2 or 3 or 6" in reason


def test_an_mlp_is_not_blamed_on_heads():
    found = find_tensor_plan(build("llama"), 4)
    assert found.plan.to_dict()["model.layers.*.mlp.up_proj"] == "colwise"
    assert not any("mlp" in layer for layer in found.whole)
