"""``tensorshard test``: a few steps under several plans on this machine, each compared with one process."""

from collections.abc import Container
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.world import default_device, join_world
from tensorshard.models import GPT, next_token_loss
from tensorshard.parallelize.build import parallelize
from tensorshard.plan.plan import Plan

_TOLERANCES = {"cpu": 1e-5, "cuda": 1e-4}  # GPUs may sum in another order each time
_STEPS = 3


class SelfTestError(RuntimeError):
    """A plan did not compute what one process computes."""


def plans(world_size: int) -> dict[str, dict[str, Any]]:
    """The plans that are tried, by their names for people."""
    plans: dict[str, dict[str, Any]] = {f"ZeRO {level}": {"zero": level} for level in (0, 1, 2, 3)}
    plans["ZeRO 3, recomputed"] = {"zero": 3, "recompute": "full"}
    if world_size % 2 == 0:
        plans["tp 2"] = {"tp": 2}
        plans["tp 2, sequence parallel"] = {"tp": 2, "sequence_parallel": True}
        plans["pp 2"] = {"pp": 2, "micro_batches": 2}
    if world_size % 4 == 0:
        plans["tp 2 x pp 2"] = {"tp": 2, "pp": 2, "micro_batches": 2}
    return plans


def run(only: Container[str] | None = None) -> None:
    """Trains a small GPT under each plan on the ranks of this world; rank 0 prints how far each is from one process.

    Args:
        only: names of plans, as :func:`plans` has them; None for all.

    Raises:
        SelfTestError: a plan differs from one process by more than rounding.
    """
    device = default_device()
    joined_before = dist.is_initialized()
    join_world(device)
    size = dist.get_world_size()
    expected = _alone(device)
    wrong = []
    for name, fields in plans(size).items():
        if only is not None and name not in only:
            continue
        difference = _difference(fields, expected, device)
        ok = difference < _TOLERANCES[device.type]
        if not ok:
            wrong.append(name)
        if dist.get_rank() == 0:
            print(f"{name:<24} {'exact' if ok else 'WRONG'}, largest difference {difference:.1e}", flush=True)
    if not joined_before:
        dist.destroy_process_group()
    if wrong:
        raise SelfTestError(f"{', '.join(wrong)} did not compute what one process does on this machine")


def _model() -> nn.Module:
    return GPT(vocab_size=64, context_length=16, num_layers=2, num_heads=4, width=32)


_OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)


def _batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(step)).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def _alone(device: torch.device) -> list[float]:
    """The losses of plain PyTorch, from the initial weights that `_model` has under any plan."""
    model = _model()
    engine = parallelize(_model, Plan(zero=0), optimizer=_OPTIMIZER, loss_fn=next_token_loss, device=device)
    state = [engine.full_state_dict()]
    dist.broadcast_object_list(state, src=0)
    model.load_state_dict(state[0])
    model.to(device)
    optimizer = _OPTIMIZER(model.parameters())
    losses = []
    for step in range(_STEPS):
        inputs, targets = _batch(step, device)
        loss = next_token_loss(model(inputs), targets)
        mean = loss if isinstance(loss, torch.Tensor) else loss[0] / loss[1]
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses


def _difference(fields: dict[str, Any], expected: list[float], device: torch.device) -> float:
    engine = parallelize(_model, Plan(**fields), optimizer=_OPTIMIZER, loss_fn=next_token_loss, device=device)
    losses = []
    for step in range(_STEPS):
        inputs, targets = (part.tensor_split(engine.mesh.dp_size)[engine.mesh.dp_rank] for part in _batch(step, device))
        losses.append(engine.step(inputs, targets).item())
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
