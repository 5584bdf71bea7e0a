"""A potential that is trained on energies and forces: its loss holds derivatives of the output by the input.

python examples/forces.py
torchrun --nproc-per-node 4 examples/forces.py --zero 3 --tp 2

A network gives the energy of a few particles (SchNet, Schutt et al. 2017, does so for atoms). The forces on them are
its negative derivatives by their positions, and the loss compares both with those of the potential that made the data:
pairs of particles that repel each other. The losses are the same on any number of ranks.
"""

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tensorshard as ts

PARTICLES = 5


class Potential(nn.Module):
    """The energy of each sample's particles: [samples, particles, 3] -> [samples]."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.pairs = nn.Linear(1, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(depth)
        )
        self.energy = nn.Linear(width, 1)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.pairs(squared_distances(positions).unsqueeze(-1)))
        for block in self.blocks:
            x = x + block(x)
        return self.energy(x).sum((1, 2))


def squared_distances(positions: torch.Tensor) -> torch.Tensor:
    """Of all pairs: [samples, particles, 3] -> [samples, pairs]."""
    first, second = torch.triu_indices(PARTICLES, PARTICLES, 1, device=positions.device)
    return (positions[:, first] - positions[:, second]).square().sum(-1)


def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    positions = batch["positions"].clone().requires_grad_()
    energy = model(positions)
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    return {"energy": F.mse_loss(energy, batch["energy"]), "force": ts.LossTerm(F.mse_loss(-slope, batch["force"]), 10)}


def samples(step: int, size: int) -> dict[str, torch.Tensor]:
    """Particles at random, with the energies and forces of the true potential."""
    positions = torch.randn(size, PARTICLES, 3, generator=torch.Generator().manual_seed(step)).requires_grad_()
    energy = (-squared_distances(positions)).exp().sum(1)
    (slope,) = torch.autograd.grad(energy.sum(), positions)
    return {"positions": positions.detach(), "energy": energy.detach(), "force": -slope}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all data ranks")
    parser.add_argument("--zero", type=int, default=1, choices=range(4))
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    optimizer, plan = partial(torch.optim.AdamW, lr=3e-3), ts.Plan(zero=args.zero, tp=args.tp)
    sample = torch.zeros(2, PARTICLES, 3)
    engine = ts.parallelize(Potential, plan, optimizer=optimizer, loss_fn=loss_fn, sample_inputs=sample)
    mesh = engine.mesh
    if args.batch_size % mesh.dp_size:
        parser.error(f"--batch-size {args.batch_size} does not divide by the {mesh.dp_size} data ranks")
    for step in range(1, args.steps + 1):
        batch = {k: v.chunk(mesh.dp_size)[mesh.dp_rank] for k, v in samples(step, args.batch_size).items()}
        loss = engine.step(batch)
        if mesh.rank == 0 and (step == 1 or step % 20 == 0):
            terms = "  ".join(f"{name} {value.item():.5f}" for name, value in engine.metrics.items())
            print(f"step {step:3d}  loss {loss.item():.5f}  {terms}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
