"""Compilation of a model's blocks (torch.compile), one by one."""

import torch
from torch import nn


def compile_blocks(blocks: list[nn.Module]) -> None:
    """Compiles each block's forward. Hooks stay outside of what is compiled."""
    for block in blocks:
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
