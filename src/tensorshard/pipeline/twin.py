"""Copies of a model, and of its inputs, on fake tensors."""

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tensorshard.pipeline.hollow import keep_padding
from tensorshard.tensor_plans.copies import computed_attributes


def make_twin(model: nn.Module, fake: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy whose parameters take no memory; buffers keep their values where they have any."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(_fake(tensor, fake, device), requires_grad=tensor.requires_grad)
        else:
            memo[id(tensor)] = sample(tensor, fake, device)
    copied = copy.deepcopy(model, {**memo, **computed_attributes(model)})
    keep_padding(copied)
    return copied


def sample(tensor: torch.Tensor, fake: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A copy with the values of `tensor` if it has any."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return _fake(tensor, fake, device)
    return tensor.detach().to(device, copy=True)  # the model may change it in place


def _fake(tensor: torch.Tensor, fake: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with fake:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
