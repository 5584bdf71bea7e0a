"""No reference model reads a value, in its constructor or in a step: plans are tried on fake tensors."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorshard.models import GPT, Bert, ViT, image_classification_loss, masked_token_loss, next_token_loss


def gpt_loss() -> tuple[nn.Module, Tensor]:
    model, tokens = GPT(50, 16, 2, 4, 32, dropout=0.1), torch.zeros(2, 16, dtype=torch.int64)
    total, count = next_token_loss(model(tokens), tokens)
    return model, total / count


def bert_loss() -> tuple[nn.Module, Tensor]:
    model, tokens = Bert(50, 16, 2, 4, 32, padding_token=0), torch.zeros(2, 16, dtype=torch.int64)
    total, count = masked_token_loss(model(tokens), tokens)
    return model, total / count


def vit_loss() -> tuple[nn.Module, Tensor]:
    model, labels = ViT(16, 4, 5, 2, 2, 32, dropout=0.1), torch.zeros(2, dtype=torch.int64)
    return model, image_classification_loss(model(torch.zeros(2, 3, 16, 16)), labels)


@pytest.mark.parametrize("model_and_loss", [gpt_loss, bert_loss, vit_loss])
def test_a_step_runs_on_fake_tensors(model_and_loss):
    with FakeTensorMode():
        model, loss = model_and_loss()
        loss.backward()
    assert loss.shape == ()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("model_and_loss", [gpt_loss, bert_loss, vit_loss])
def test_a_step_runs_on_the_meta_device(model_and_loss):
    with torch.device("meta"):
        model, loss = model_and_loss()
        loss.backward()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
