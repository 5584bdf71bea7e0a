"""A classifier of a million classes. Every softmax has every class, and no logits or head gradients are in memory.

python examples/million_classes.py --backbone mlp --classes 100000
torchrun --nproc-per-node 2 examples/million_classes.py --backbone mlp --classes 1000000 --states bf16
torchrun --nproc-per-node 8 examples/million_classes.py --classes 9000000 --states bf16        # ResNet-50, needs [hf]

It is data parallel up to the head, whose classes are split over all ranks. The head updates its weight in backward, so
its gradient never exists. The backbone has its own optimizer. Data is generated: each class is a point, and a sample is
near its point. Only some classes have samples.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tensorshard as ts

STATES = {  # type of the weight, and of its momentum
    "fp32": (torch.float32, "fp32"),
    "bf16": (torch.bfloat16, "bf16"),
    "int8": (torch.bfloat16, "int8"),
}
CARDS = (("8 x 12 GB", 96), ("16 x 12 GB", 192), ("8 x 32 GB", 256), ("8 x 80 GB", 640))
HEAD_SHARE = 0.9  # of a GPU's memory; the rest is for the backbone and a tile of logits
MOMENTUM = 0.9


def main() -> None:
    args = parse_arguments()
    ts.distributed.init_process_group()  # under torchrun all ranks are one group; else there is one rank
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"])) if dist.get_backend() == "nccl" else torch.device("cpu")
    )
    torch.manual_seed(args.seed)
    backbone, features = make_backbone(args)
    dtype, momentum_dtype = STATES[args.states]
    world_size = dist.get_world_size()
    head = ts.nn.ParallelLinearCrossEntropy(
        features,
        args.classes,
        gather_inputs=True,  # each rank has its own samples; those of all ranks are compared with all classes
        grad_scale=world_size,  # undoes DistributedDataParallel's average, since the loss is a mean already
        update=dict(lr=args.lr, momentum=MOMENTUM, momentum_dtype=momentum_dtype),
        device=device,
        dtype=dtype,
    )
    model = backbone.to(device)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=MOMENTUM)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, args.steps) for each in (optimizer, head.optimizer)]
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank())

    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        inputs, targets = (tensor.to(device) for tensor in sample(args, generator))
        optimizer.zero_grad()
        loss = head(model(inputs), targets)
        loss.backward()
        optimizer.step()
        head.optimizer.step()  # its work was done in backward; this ends the step
        for scheduler in schedulers:
            scheduler.step()
        if step % args.log_every == 0 or step == args.steps:
            say(f"step {step}/{args.steps}  loss {loss.item():.4f}  {time.perf_counter() - start:.2f} s")

    inputs, targets = (tensor.to(device) for tensor in sample(args, generator))
    with torch.no_grad():
        accuracy = head.accuracy(model(inputs), targets, k=5).item()
    say(f"of fresh samples of {args.seen} classes, {accuracy:.0%} have theirs among the first 5 of all")
    report(head)
    ts.distributed.destroy_process_group()
    dist.destroy_process_group()


def make_backbone(args: argparse.Namespace) -> tuple[nn.Module, int]:
    """The model that makes features of inputs, and the number of features."""
    if args.backbone == "mlp":
        layers = [nn.Linear(args.inputs, args.features), nn.ReLU(), nn.Linear(args.features, args.features)]
        return nn.Sequential(*layers), args.features
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig()  # of ResNet-50
    if args.backbone == "resnet-tiny":
        config = ResNetConfig(layer_type="basic", hidden_sizes=[8, 16], depths=[1, 1], embedding_size=8)
    return Pooled(ResNetModel(config)), config.hidden_sizes[-1]


class Pooled(nn.Module):
    """A ResNet's features, averaged over the image."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.backbone(images).pooler_output.flatten(1)


def sample(args: argparse.Namespace, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of this rank, with random classes."""
    seen = torch.randint(args.classes, (args.seen,), generator=torch.Generator().manual_seed(args.seed))
    targets = seen[torch.randint(args.seen, (args.batch_size,), generator=generator)]
    shape = (args.inputs,) if args.backbone == "mlp" else (3, args.image_size, args.image_size)
    points = [torch.randn(shape, generator=torch.Generator().manual_seed(target)) for target in targets.tolist()]
    return torch.stack(points) + 0.1 * torch.randn((len(targets), *shape), generator=generator), targets


def report(head: ts.nn.ParallelLinearCrossEntropy) -> None:
    """Prints the memory of a class, as measured here, and how many classes would fit on some well-known machines."""
    local = head.weight.detach()
    held = local.numel() * local.element_size() + head.optimizer.state_bytes()
    per_class = held / len(local)
    say(f"{head.num_classes:,} classes of {head.in_features} features, {per_class:,.0f} bytes each.")
    say(f"This rank holds {len(local):,} of them: {held / 1e6:,.1f} MB of weight and momentum.")
    say(f"With {HEAD_SHARE:.0%} of the memory for them,")
    for name, gigabytes in CARDS:
        say(f"  {name:<10} would hold {HEAD_SHARE * gigabytes * 1e9 / per_class / 1e6:6.1f} million classes")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", choices=("resnet50", "resnet-tiny", "mlp"), default="resnet50")
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--states", choices=list(STATES), default="fp32", help="types of the weight and its momentum")
    parser.add_argument("--seen", type=int, default=64, help="classes that have samples")
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, help="default 0.1 with the MLP, 0.01 with a ResNet")
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=64, help="numbers that a sample of the MLP has")
    parser.add_argument("--features", type=int, default=512, help="of the MLP")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.lr is None:
        args.lr = 0.1 if args.backbone == "mlp" else 0.01
    return args


if __name__ == "__main__":
    main()
