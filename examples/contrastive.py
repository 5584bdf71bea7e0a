"""A contrastive loss (as CLIP's, Radford et al. 2021) that is the same on any number of data ranks.

python examples/contrastive.py
torchrun --nproc-per-node 4 examples/contrastive.py --zero 3

Each image is compared with all texts of the global batch, and each text with all images. A data rank has only a part of
the batch. So the towers' features are gathered, and their gradients go back to the ranks that computed them. Data is
generated: an image and its text are two noisy views of one point.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tensorshard as ts

CONCEPTS, PIXELS, WORDS, FEATURES = 64, 48, 24, 32


class TwoTowers(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(PIXELS, width), nn.GELU(), nn.Linear(width, FEATURES))
        self.text = nn.Sequential(nn.Linear(WORDS, width), nn.GELU(), nn.Linear(width, FEATURES))
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1), self.log_scale.exp()


def loss_of_pairs(output: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Each image is compared with all texts, and each text with all images."""
    images, texts, scale = output
    scores, pairs = scale * images @ texts.T, torch.arange(len(images), device=images.device)
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs)) / 2


def contrastive_loss(output: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
    images, texts, scale = output
    return loss_of_pairs((ts.gather_samples(images), ts.gather_samples(texts), scale))


def pairs(step: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [size, PIXELS] and texts [size, WORDS] of `size` concepts."""
    world = torch.Generator().manual_seed(seed)
    views = [torch.randn(CONCEPTS, width, generator=world) for width in (PIXELS, WORDS)]
    generator = torch.Generator().manual_seed(seed + 1 + step)
    concepts = torch.randperm(CONCEPTS, generator=generator)[:size]
    images, texts = (v[concepts] + 0.3 * torch.randn(size, v.size(1), generator=generator) for v in views)
    return images, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="pairs in a step, over all data ranks")
    parser.add_argument("--zero", type=int, default=1, choices=range(4))
    args = parser.parse_args()
    optimizer, plan = partial(torch.optim.AdamW, lr=3e-3), ts.Plan(zero=args.zero)
    engine = ts.parallelize(TwoTowers, plan, optimizer=optimizer, loss_fn=contrastive_loss, debug=True)
    mesh = engine.mesh
    if args.batch_size % mesh.dp_size:
        parser.error(f"--batch-size {args.batch_size} does not divide by the {mesh.dp_size} data ranks")
    for step in range(1, args.steps + 1):
        images, texts = (part.chunk(mesh.dp_size)[mesh.dp_rank] for part in pairs(step, args.batch_size))
        loss = engine.step((images, texts), texts)  # the loss needs no targets: the pairs are known
        if mesh.rank == 0 and (step == 1 or step % 20 == 0):
            print(f"step {step:3d}  loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
