"""A generative adversarial network (Goodfellow et al. 2014): two models, two optimizers, two Engines in one world.

python examples/gan.py
torchrun --nproc-per-node 2 examples/gan.py --zero 3
torchrun --nproc-per-node 4 examples/gan.py --tp 2

Each Engine takes its own steps. The generator's loss goes through the critic, which is frozen meanwhile. Data is
generated: points on a circle.
"""

import argparse
import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tensorshard as ts

NOISE, WIDTH = 8, 64


def network(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


def critic_loss(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"real": F.softplus(-model(batch["real"])).mean(), "made": F.softplus(model(batch["made"])).mean()}


def generator_loss(critic: ts.Engine, model: Any, noise: torch.Tensor) -> torch.Tensor:
    return F.softplus(-critic.model(model(noise))).mean()


def points(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on a circle [size, 2], and noise [size, NOISE]."""
    generator = torch.Generator().manual_seed(step)
    angles = 2 * math.pi * torch.rand(size, generator=generator)
    return torch.stack([angles.cos(), angles.sin()], 1), torch.randn(size, NOISE, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all data ranks")
    parser.add_argument("--zero", type=int, default=1, choices=range(4))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    args = parser.parse_args()
    plan = ts.Plan(zero=args.zero, tp=args.tp, pp=args.pp)
    adam = partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.9), eps=1e-5)
    critic = ts.parallelize(partial(network, 2, 1), plan, optimizer=adam, loss_fn=critic_loss)
    loss_fn = partial(generator_loss, critic)
    generator = ts.parallelize(partial(network, NOISE, 2), plan, optimizer=adam, loss_fn=loss_fn, seed=1)
    mesh = generator.mesh
    for step in range(1, args.steps + 1):
        real, noise = (part.chunk(mesh.dp_size)[mesh.dp_rank] for part in points(step, args.batch_size))
        made = generator.predict(noise)
        critic.unfreeze("*")
        critics = critic.step({"real": real, "made": made})
        critic.freeze("*")
        generators = generator.step(noise)
        if mesh.rank == 0 and (step == 1 or step % 20 == 0):
            print(f"step {step:3d}  critic loss {critics.item():.6f}  generator loss {generators.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
