"""A GPT under ``Plan(offload=...)``, with bf16 weights and recomputed blocks."""

from collections.abc import Mapping
from typing import Any

import torch

import tensorshard as ts
from benchmarks.offloads import OPTIMIZER, OffloadWork
from tensorshard.models import next_token_loss


class Training:
    """Training steps of `engine`."""

    def __init__(self, engine: ts.Engine) -> None:
        self._engine = engine

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One step; returns the loss."""
        return self._engine.step(inputs, targets).item()

    def finish(self) -> None:
        """Waits for an update that goes on behind the last step."""
        self._engine.wait_for_update()

    def on_disk(self) -> dict[str, int]:
        """Bytes of each kind that this rank has on disk."""
        by_kind = self._engine.storage.held_by_kind
        return {kind: nbytes for (kind, tier), nbytes in by_kind.items() if tier == "disk"}


def build(work: OffloadWork, rank: int, world_size: int, folder: str, offload: Mapping[str, Any] | None) -> Training:
    """Training steps of a plan.

    Args:
        offload: fields of :class:`tensorshard.Offload`; None to keep everything in memory.
    """
    given: Any = None if offload is None else ts.Offload(path=folder, **offload)
    zero = 3 if offload is not None and "parameters" in offload else 2  # which parameters are offloaded at
    plan = ts.Plan(zero=zero, precision="bf16", recompute="full", clip_grad_norm=1.0, offload=given)
    return Training(ts.parallelize(work.build, plan, optimizer=OPTIMIZER, loss_fn=next_token_loss))
