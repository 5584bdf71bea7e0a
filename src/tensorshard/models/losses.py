"""Losses of the reference models."""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED_TARGET = -100


def next_token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the targets that count, and how many those are.

    The sum and the count are given apart because batches differ in how many targets count: the mean over
    several of them is the sum of sums over the sum of counts.

    Args:
        logits: ``[..., vocab_size]``; 16-bit ones are summed in fp32.
        targets: int64 ``[...]``; -100 where there is nothing to predict.

    Returns:
        The sum in nats and the count, each a tensor without dimensions, of the logits' type or fp32 if that
        is wider.
    """
    logits = _at_least_fp32(logits)
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
    return total, (targets != IGNORED_TARGET).sum().to(logits.dtype)


# The data decide what is predicted, the next token or a masked one. The loss is the same.
masked_token_loss = next_token_loss


def image_classification_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of ``[batch, num_classes]`` logits, in nats; 16-bit ones are averaged in fp32."""
    return F.cross_entropy(_at_least_fp32(logits), targets)


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
