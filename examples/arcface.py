"""Learning to tell faces apart with a margin: ArcFace or CosFace, with the people split over all ranks.

python examples/arcface.py
python examples/arcface.py --margin cosface --people 2000
torchrun --nproc-per-node 2 examples/arcface.py --people 10000 --sample-rate 0.1

Faces are generated: each person is a smooth pattern, and each picture has its own light and noise. The people of the
test are not those of the training. As in face verification, pairs of pictures are told apart by the angle between their
embeddings. The threshold for one half of the pairs is the best one for the other half.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tensorshard as ts

MARGINS = {"arcface": ts.nn.ArcFace(0.5), "cosface": ts.nn.CosFace(0.35), "none": None}
SIDE, WAVES = 16, 5  # pixels on each side; a pattern has WAVES^2 parts


class Faces:
    """Makes pictures [n, SIDE * SIDE] of people, each from the person's number."""

    def __init__(self, seed: int) -> None:
        grid = torch.linspace(0, torch.pi, SIDE)
        waves = [torch.outer(torch.cos(a * grid), torch.cos(b * grid)) for a in range(WAVES) for b in range(WAVES)]
        self.basis = torch.stack(waves).flatten(1)
        self.seed = seed

    def pictures(self, people: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """One picture of each of `people`, who may occur several times."""
        makers = [torch.Generator().manual_seed(self.seed * 1_000_003 + person) for person in people.tolist()]
        patterns = torch.stack([torch.randn(len(self.basis), generator=maker) for maker in makers]) @ self.basis
        light = 1 + 0.3 * torch.randn(len(people), 1, generator=generator)
        return patterns * light / WAVES + 0.7 * torch.randn(patterns.shape, generator=generator)


def main() -> None:
    args = parse_arguments()
    ts.distributed.init_process_group()  # under torchrun all ranks are one group; else there is one rank
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"])) if dist.get_backend() == "nccl" else torch.device("cpu")
    )
    torch.manual_seed(args.seed)
    backbone = nn.Sequential(nn.Linear(SIDE * SIDE, 256), nn.ReLU(), nn.Linear(256, args.features)).to(device)
    head = ts.nn.ParallelLinearCrossEntropy(
        args.features,
        args.people,
        margin=MARGINS[args.margin],
        normalize=True,
        scale=args.scale,
        sample_rate=args.sample_rate,
        gather_inputs=True,
        grad_scale=dist.get_world_size(),
        update=dict(lr=args.lr, momentum=0.9, weight_decay=5e-4),
        device=device,
    )
    model = DistributedDataParallel(backbone) if dist.get_world_size() > 1 else backbone
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, args.steps) for each in (optimizer, head.optimizer)]
    faces = Faces(args.seed)
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank())
    accuracy = verification_accuracy(args, backbone, faces, device)
    say(f"before training, {accuracy:.1%} of pairs of strangers are told apart")
    for step in range(1, args.steps + 1):
        people = torch.randint(args.people, (args.batch_size,), generator=generator)
        optimizer.zero_grad()
        loss = head(model(faces.pictures(people, generator).to(device)), people.to(device))
        loss.backward()
        optimizer.step()
        head.optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        if step % max(1, args.steps // 5) == 0:
            say(f"step {step}/{args.steps}  loss {loss.item():.4f}")
    say(f"after it, {verification_accuracy(args, backbone, faces, device):.1%} are ({args.margin})")
    ts.distributed.destroy_process_group()
    dist.destroy_process_group()


@torch.no_grad()
def verification_accuracy(args: argparse.Namespace, backbone: nn.Module, faces: Faces, device: torch.device) -> float:
    """The share of pairs that a threshold on their cosine classifies correctly. The people are new to the model."""
    generator = torch.Generator().manual_seed(args.seed + 77)
    first = args.people + torch.randint(10_000, (args.pairs,), generator=generator)
    same = torch.arange(args.pairs) % 2 == 0
    second = torch.where(same, first, first + 1 + torch.randint(9_999, (args.pairs,), generator=generator))
    embeddings = [F.normalize(backbone(faces.pictures(people, generator).to(device))) for people in (first, second)]
    cosine = (embeddings[0] * embeddings[1]).sum(1).cpu()
    half = args.pairs // 2
    thresholds = torch.linspace(-1, 1, 401)
    right = ((cosine[:half, None] > thresholds) == same[:half, None]).float().mean(0)
    return ((cosine[half:] > thresholds[right.argmax()]) == same[half:]).float().mean().item()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--margin", choices=list(MARGINS), default="arcface")
    parser.add_argument("--people", type=int, default=500)
    parser.add_argument("--features", type=int, default=64, help="of an embedding")
    parser.add_argument("--scale", type=float, default=32.0, help="that cosines are multiplied with")
    parser.add_argument("--sample-rate", type=float, default=1.0, help="share of the people in a softmax (Partial FC)")
    parser.add_argument("--batch-size", type=int, default=128, help="of each rank")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--pairs", type=int, default=2000, help="of pictures, in the test")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
