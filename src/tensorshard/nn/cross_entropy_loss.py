"""Losses of logits that are full or split."""

from typing import Any

import torch
from torch import nn

from tensorshard.comm.groups import Group, resolve_mesh
from tensorshard.loss.formulas import CrossEntropySpec
from tensorshard.loss.split_cross_entropy import parallel_cross_entropy


class ParallelCrossEntropyLoss(nn.CrossEntropyLoss):
    """``nn.CrossEntropyLoss`` that also takes logits whose classes are split over a group.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as in ``nn.CrossEntropyLoss``.
        z_loss, softcap, use_token_scaling, return_lse, return_token_accuracy, group: as in
            :func:`tensorshard.nn.functional.parallel_cross_entropy`.

    Raises:
        ValueError: an option is out of its range.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> classifier = ts.nn.ParallelLinear(16, 1000, dim=1)
        >>> logits = classifier(torch.randn(8, 16))  # this rank's half of the classes
        >>> ts.nn.ParallelCrossEntropyLoss()(logits, torch.arange(8)).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        use_token_scaling: bool = False,
        return_lse: bool = False,
        return_token_accuracy: bool = False,
        group: Group | None = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        CrossEntropySpec(1, ignore_index, label_smoothing, z_loss, self.reduction, softcap)  # which checks them
        self.z_loss, self.softcap, self.use_token_scaling = z_loss, softcap, use_token_scaling
        self.return_lse, self.return_token_accuracy = return_lse, return_token_accuracy
        self._mesh = None if group is None else resolve_mesh(group)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> Any:
        """Computes :func:`tensorshard.nn.functional.parallel_cross_entropy` with this module's options.

        Args:
            input: logits [N, C], [C] or [N, C, d1, ...], full or this rank's shard.
            target: class numbers, of the shape of `input` without the class dimension, the same on every rank.

        Returns:
            The loss, the same on every rank of the group. With any ``return_`` option a
            :class:`tensorshard.nn.CrossEntropyOutput`.

        Raises:
            IndexError: a target is outside the classes.
            ValueError: the shapes or types do not fit.
        """
        return parallel_cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            use_token_scaling=self.use_token_scaling,
            return_lse=self.return_lse,
            return_token_accuracy=self.return_token_accuracy,
            group=self._mesh,
        )
