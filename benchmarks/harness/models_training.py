"""Training a case for a few steps: by one plain process, and by a rank under a plan."""

import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_map

import tensorshard as ts
from benchmarks.models.case import Batch, Case
from benchmarks.models.plans import PlanCase

STEPS = 3
SAMPLES = 8  # of the global batch
# Some gradients are zero but for rounding (of the biases of keys in attention). AdamW would divide them by themselves.
# An epsilon far above the rounding keeps those weights unchanged.
OPTIMIZER = partial(torch.optim.AdamW, lr=3e-3, eps=1e-4)


@dataclass
class Trained:
    """The result of a training.

    Args:
        losses: one per step.
        state: the state dict afterwards; empty on ranks other than the first.
        wall_seconds, cpu_seconds: of ``parallelize``.
        split_share: share of the weights that tp splits.
        kept_share: share of the weights that tp splits only in memory. Every rank computes with all of them.
        gathered: names of operations that cp computed on whole sequences.
        moved: how far training took each entry of the state dict, at most.
        samples: whether each sample was seen to be computed alone, or why not.
    """

    losses: list[float]
    state: dict[str, torch.Tensor]
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    split_share: float | None = None
    kept_share: float | None = None
    gathered: list[str] = field(default_factory=list)
    moved: dict[str, float] = field(default_factory=dict)
    samples: str = ""


def build(case: Case, dtype: torch.dtype = torch.float32, drops: bool = True) -> nn.Module:
    """The case's model, in training, with the same weights every time.

    Args:
        drops: whether dropout is on.
    """
    torch.manual_seed(1)
    random.seed(1)  # some packages draw initial values, or the seeds for them, with these
    numpy.random.seed(1)
    model = case.built(drops).train()
    return model if dtype == torch.float32 else model.to(dtype)


def batch(case: Case, step: int, dtype: torch.dtype = torch.float32) -> Batch:
    """The global batch of a step."""
    drawn = case.batch(SAMPLES, torch.Generator().manual_seed(1000 + step))
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, drawn)


def train_alone(
    case: Case,
    micro_batches: int,
    dtype: torch.dtype = torch.float32,
    *,
    compiled: bool = False,
    random: str = "same",
) -> Trained:
    """Trains the case with plain PyTorch in one process, with the plan's number of micro-batches.

    Args:
        random: as in the Plan. By rank, dropout is off, as each plan would draw other numbers.
    """
    model = build(case, dtype, random == "same")
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if compiled:
        model.compile()
    optimizer = OPTIMIZER([p for p in model.parameters() if p.requires_grad])
    losses = []
    with ts.same_randomness(model) if random == "same" else nullcontext() as numbers:
        for step in range(STEPS):
            total = 0.0
            for part in range(micro_batches):
                inputs, targets = _part(batch(case, step, dtype), part, micro_batches)
                if numbers is not None:
                    numbers.at(part * len(targets))
                loss = case.loss(_call(model, inputs), targets) / micro_batches
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    moved = {n: (state[n].double() - v.double()).abs().max().item() for n, v in before.items() if v.numel()}
    return Trained(losses, state, moved=moved)


def train_under(
    case: Case,
    plan: PlanCase,
    *,
    dtype: torch.dtype = torch.float32,
    with_samples: bool = False,
    order: str = "as drawn",
    progress: dict[str, Any] | None = None,
) -> Trained:
    """Trains the case on this rank of the plan.

    Args:
        with_samples: whether ``parallelize`` is given the inputs of a first batch.
        order: of the batch's samples: "as drawn", "flipped" or "rolled".
        progress: its "stage" always says what is going on: "parallelize", "step 1", ... "state".
    """
    progress = {} if progress is None else progress
    progress["stage"] = "parallelize"
    samples: Any = {"sample_inputs": batch(case, 0, dtype)[0]} if with_samples else {}
    model = build(case, dtype, plan.random_of(case) == "same")
    wall, cpu = time.perf_counter(), time.process_time()
    chosen = ts.Plan(random=plan.random_of(case), **plan.fields)
    engine = ts.parallelize(model, chosen, optimizer=OPTIMIZER, loss_fn=case.loss, **samples)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    table = getattr(engine.sharded.split, "table", None)
    progress["split_share"] = share = getattr(table, "split_share", None)
    losses = []
    for step in range(STEPS):
        progress["stage"] = f"step {step + 1}"
        drawn = tree_map(partial(_ordered, order), batch(case, step, dtype))
        losses.append(engine.step(*_part(drawn, engine.mesh.dp_rank, engine.mesh.dp_size)).item())
    gathered = sorted({operation for operation, _ in engine.sharded.sequences.gathered_operations})
    progress["stage"] = "state"
    state = engine.full_state_dict()
    kept = getattr(table, "kept_share", None)
    return Trained(losses, state, wall, cpu, share, kept, gathered, samples=engine._samples.verdict)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _part(drawn: Batch, index: int, count: int) -> Batch:
    if count == 1:
        return drawn
    return tree_map(lambda t: t.chunk(count)[index] if isinstance(t, torch.Tensor) else t, drawn)


def _ordered(order: str, tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or order == "as drawn":
        return tensor
    return tensor.flip(0) if order == "flipped" else tensor.roll(3, 0)
