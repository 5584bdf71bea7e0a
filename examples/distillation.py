"""Distillation (Hinton et al. 2015): a small language model learns the distributions of a larger one.

python examples/distillation.py
torchrun --nproc-per-node 4 examples/distillation.py --student zero=1 --teacher zero=3
torchrun --nproc-per-node 2 examples/distillation.py --student tp=2,logits=tiled --teacher tp=2,logits=tiled

The teacher is frozen. It has the student's data ranks and a plan of its own, and is called in the loss. With
logits=tiled neither model's logits are held. An average of the student's weights is evaluated beside it. Data is
generated: the teacher has learnt to count.
"""

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss

VOCABULARY, LENGTH = 64, 16


def loss_fn(teacher: ts.FrozenModel, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    tokens, targets = batch
    logits = model(tokens)
    hard = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()
    soft = teacher.distillation_loss(tokens, logits, temperature=2.0)
    return {"hard": ts.LossTerm(hard, 0.5), "soft": ts.LossTerm(soft, 0.5)}


def counting(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    start = torch.randint(VOCABULARY, (samples, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def plan(text: str) -> ts.Plan:
    fields = dict(field.split("=") for field in text.split(",") if field)
    return ts.Plan(**{key: int(value) if value.isdecimal() else value for key, value in fields.items()})


def trained_teacher() -> torch.nn.Module:
    """The same on every rank: in place of weights from files."""
    torch.manual_seed(1)
    model = GPT(VOCABULARY, LENGTH, num_layers=2, num_heads=4, width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        total, count = next_token_loss(model((batch := counting(step, 16))[0]), batch[1])
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a step, over all data ranks")
    parser.add_argument("--student", type=plan, default="zero=1", help="fields of its plan, such as zero=3,tp=2")
    parser.add_argument("--teacher", type=plan, default="zero=3", help="fields of its plan")
    args = parser.parse_args()
    teacher = ts.parallelize_frozen(trained_teacher(), args.teacher)
    model = partial(GPT, VOCABULARY, LENGTH, num_layers=1, num_heads=2, width=32)
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    student = ts.parallelize(model, args.student, optimizer=optimizer, loss_fn=partial(loss_fn, teacher))
    average, mesh = student.average(decay=0.9), student.mesh
    for step in range(1, args.steps + 1):
        batch = tuple(part.chunk(mesh.dp_size)[mesh.dp_rank] for part in counting(step, args.batch_size))
        loss = student.step(batch)
        with average.applied():
            averaged = student.evaluate(batch)
        if mesh.rank == 0 and (step == 1 or step % 20 == 0):
            print(f"step {step:3d}  loss {loss.item():.6f}  averaged loss {averaged.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
