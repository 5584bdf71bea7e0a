"""Copies of a model, and of its inputs, on fake tensors."""

import torch
from torch import nn

from tensorshard.modules.fake_copies import copy_with, keep_padding
from tensorshard.torch_private.fake_tensors import FakeTensor, FakeTensorMode


def make_fake_copy(model: nn.Module, fake: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy whose parameters take no memory; buffers keep their values where they have any."""
    copied = copy_with(
        model, lambda _, tensor: (_fake if isinstance(tensor, nn.Parameter) else sample)(tensor, fake, device)
    )
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
