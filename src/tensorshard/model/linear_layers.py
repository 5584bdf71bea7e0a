"""Modules that compute as a linear layer does."""

from torch import nn

from tensorshard.model.forwards import has_users_forward


def is_transposed(module: nn.Module) -> bool:
    """Whether `module` computes as the ``Conv1D`` of transformers: a linear layer whose weight is [inputs, outputs]."""
    forward = type(module).forward
    home, name = getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")
    return name == "Conv1D.forward" and home.startswith("transformers.") and not has_users_forward(module)
