"""The simplest way to have states on a disk: tensors that are mapped to a file, and torch's fused AdamW on them.

The system reads and writes pages of the file as they are touched. Weights that forward computes with, and gradients,
are bf16 and in memory. One process alone.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint

from benchmarks.offloads import OPTIMIZER, OffloadWork
from tensorshard.models import next_token_loss

_CLIP = 1.0


class Training:
    """Training steps of one process.

    Args:
        folder: of the files, which have names for an instant.
    """

    def __init__(self, work: OffloadWork, folder: str) -> None:
        torch.manual_seed(0)
        self._model = work.build().to(torch.bfloat16)
        for block in self._model.blocks:
            block.forward = _recomputed(block.forward)
        self._mapped: dict[str, int] = {"master weights": 0, "optimizer states": 0}
        with tempfile.TemporaryDirectory(dir=folder) as names:

            def mapped(name: str, like: torch.Tensor, kind: str) -> torch.Tensor:
                self._mapped[kind] += 4 * like.numel()
                file = str(Path(names) / name)
                return torch.from_file(file, shared=True, size=like.numel(), dtype=torch.float32).view_as(like)

            parameters = list(self._model.parameters())
            self._masters = [nn.Parameter(mapped(f"{i}", p, "master weights")) for i, p in enumerate(parameters)]
            self._optimizer = OPTIMIZER(self._masters)
            for i, (master, parameter) in enumerate(zip(self._masters, parameters, strict=True)):
                master.data.copy_(parameter)
                self._optimizer.state[master] = {
                    "step": torch.zeros(()),
                    **{key: mapped(f"{i}{key}", master, "optimizer states") for key in ("exp_avg", "exp_avg_sq")},
                }

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One step; returns the loss."""
        total, count = next_token_loss(self._model(inputs).float(), targets)
        loss = total / count
        loss.backward()
        parameters = list(self._model.parameters())
        factor = torch.clamp(_CLIP / (get_total_norm([p.grad for p in parameters]) + 1e-6), max=1.0)
        for master, parameter in zip(self._masters, parameters, strict=True):
            master.grad = parameter.grad.float().mul_(factor)
            parameter.grad = None
            _step_of(self._optimizer, master)
            master.grad = None
            parameter.data.copy_(master)
        return loss.item()

    def finish(self) -> None:
        """Nothing is under way after a step."""

    def on_disk(self) -> dict[str, int]:
        """Bytes of each kind that are mapped to files."""
        return dict(self._mapped)


def build(work: OffloadWork, rank: int, world_size: int, folder: str) -> Training:
    """Training steps of a process that is alone.

    Raises:
        ValueError: it is not.
    """
    if world_size > 1:
        raise ValueError(f"this contender runs in one process, and there are {world_size}")
    return Training(work, folder)


def _step_of(optimizer: torch.optim.Optimizer, master: nn.Parameter) -> None:
    [group] = optimizer.param_groups
    every, group["params"] = group["params"], [master]
    optimizer.step()
    group["params"] = every


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)
