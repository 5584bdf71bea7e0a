"""The TorchShard article's ImageNet script: data parallel up to the last layer, which is split over all ranks.

pip install -c constraints.txt ".[hf]"
python examples/imagenet.py --arch tiny --image-size 32 --classes 10
torchrun --nproc-per-node 2 examples/imagenet.py --classes 1000000 --model-parallel-dim 1 --amp --zero --save run.pt
torchrun --nproc-per-node 4 examples/imagenet.py --classes 1000000 --model-parallel-dim 1 --amp --zero --resume run.pt

Without a folder it trains on generated images. A folder has train/CLASS/IMAGE and val/CLASS/IMAGE, and needs Pillow.
Any number of processes can resume what a run has saved, with or without ZeRO, whatever is split.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import ResNetConfig, ResNetModel

import tensorshard as ts
from tensorshard.data import GeneratedImages

ARCHITECTURES = {  # kind of block, features and blocks of each stage
    "tiny": ("basic", [8, 16], [1, 1]),
    "resnet18": ("basic", [64, 128, 256, 512], [2, 2, 2, 2]),
    "resnet34": ("basic", [64, 128, 256, 512], [3, 4, 6, 3]),
    "resnet50": ("bottleneck", [256, 512, 1024, 2048], [3, 4, 6, 3]),
    "resnet101": ("bottleneck", [256, 512, 1024, 2048], [3, 4, 23, 3]),
}


class ResNet(nn.Module):
    """A ResNet whose last layer sees the samples of all ranks, since each rank holds only a part of that layer."""

    def __init__(self, arch: str, classes: int) -> None:
        super().__init__()
        layer_type, widths, depths = ARCHITECTURES[arch]
        config = ResNetConfig(
            layer_type=layer_type, hidden_sizes=widths, depths=depths, embedding_size=min(64, widths[0])
        )
        self.backbone = ResNetModel(config)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.backbone(images).pooler_output.flatten(1)
        x = ts.distributed.gather(x, dim=0)
        return self.fc(x)


class ImageFolder(Dataset):
    """Images in one folder per class. Each is cropped to its middle, as [3, size, size], normalized as for ResNets."""

    def __init__(self, folder: Path, size: int) -> None:
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self.items = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())]
        self.num_classes, self.size = len(classes), size

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import numpy
        from PIL import Image, ImageOps

        path, label = self.items[index]
        with Image.open(path) as image:
            pixels = numpy.asarray(ImageOps.fit(image.convert("RGB"), (self.size, self.size)))
        tensor = torch.tensor(pixels).permute(2, 0, 1) / 255
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        return (tensor - mean[:, None, None]) / std[:, None, None], label


def main() -> None:
    args = parse_arguments()
    ts.init_process_group()  # under torchrun all ranks are one group; else there is one rank
    world_size = dist.get_world_size()
    if args.batch_size % world_size:
        raise SystemExit(
            f"--batch-size {args.batch_size} is that of all {world_size} processes: use a multiple of them"
        )
    if args.save and not Path(args.save).absolute().parent.is_dir():
        raise SystemExit(f"--save {args.save}: there is no folder to put it in")
    if args.resume and not Path(args.resume).is_file():
        raise SystemExit(f"--resume {args.resume}: there is no such file")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    train_set, val_set = datasets(args)

    torch.manual_seed(args.seed)
    model = ResNet(args.arch, args.classes)
    ts.nn.ParallelLinear.convert_parallel_linear(model, dim=args.model_parallel_dim)
    model = DistributedDataParallel(model.to(device))
    criterion = ts.nn.ParallelCrossEntropyLoss()
    sgd = {"lr": args.lr, "momentum": args.momentum, "weight_decay": args.weight_decay}
    if args.zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, **sgd)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **sgd)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp)
    first_epoch = load(args.resume, model, optimizer, scaler) if args.resume else 0
    report_what_is_held(model, args)

    if args.evaluate:
        evaluate(val_set, model, device, args)
    for epoch in range(first_epoch, 0 if args.evaluate else args.epochs):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.1 ** (epoch // 30)
        train(epoch, train_set, model, criterion, optimizer, scaler, device, args)
        evaluate(val_set, model, device, args)
        if args.save:
            save(args.save, epoch + 1, model, optimizer, scaler)
    dist.destroy_process_group()


def train(epoch, train_set, model, criterion, optimizer, scaler, device, args) -> None:
    model.train()
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    sampler.set_epoch(epoch)
    batch_size = args.batch_size // dist.get_world_size()
    loader = DataLoader(train_set, batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)
    start, seen = time.perf_counter(), 0
    for step, (images, labels) in enumerate(loader, start=1):
        with torch.autocast(device.type, enabled=args.amp):
            output = model(images.to(device))
            target = ts.distributed.gather(labels.to(device), dim=0)
            loss = criterion(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += len(target)
        if step % args.print_every == 0 or step == len(loader):
            value, rate = loss.item(), seen / (time.perf_counter() - start)
            say(f"epoch {epoch + 1}  step {step}/{len(loader)}  loss {value:.4f}  {rate:.1f} images/s")


@torch.no_grad()
def evaluate(val_set, model, device, args) -> None:
    model.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size = max(1, args.batch_size // world_size)
    # The sampler repeats images at the end if the number of images is not divisible by the ranks. These do not count.
    loader = DataLoader(val_set, batch_size, sampler=DistributedSampler(val_set, shuffle=False))
    correct = torch.zeros(2, dtype=torch.int64, device=device)
    for step, (images, labels) in enumerate(loader):
        own_place = (step * batch_size + torch.arange(len(labels), device=device)) * world_size + rank
        place = ts.distributed.gather(own_place, dim=0)
        target = ts.distributed.gather(labels.to(device), dim=0)
        output = model(images.to(device))
        if args.model_parallel_dim in (1, -1):
            output = ts.distributed.gather(output, dim=-1)
        best = output.topk(min(5, args.classes)).indices == target[:, None]
        counts = place < len(val_set)
        correct += torch.stack([(best[:, 0] & counts).sum(), (best.any(1) & counts).sum()])
    top1, top5 = (100 * correct / len(val_set)).tolist()
    say(f"validation  top 1 {top1:.2f}%  top 5 {top5:.2f}%  of {len(val_set)} images")


def save(path, epoch, model, optimizer, scaler) -> None:
    """Writes full tensors, as a model that is not parallel has them. Every rank takes part; the first one writes."""
    model_state = ts.collect_state_dict(model.module, rank0_only=True, device="cpu")
    optimizer_state = ts.collect_state_dict(optimizer, rank0_only=True, device="cpu")
    state = {"epoch": epoch, "model": model_state, "optimizer": optimizer_state, "scaler": scaler.state_dict()}
    if dist.get_rank() == 0:
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)  # so that a crash leaves the previous one
    say(f"saved {path} after epoch {epoch}")


def load(path, model, optimizer, scaler) -> int:
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.module.load_state_dict(ts.relocate_state_dict(model.module, state["model"]))
    optimizer.load_state_dict(ts.relocate_state_dict(optimizer, state["optimizer"]))
    if scaler.is_enabled() and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    say(f"resumed {path} after epoch {state['epoch']}")
    return state["epoch"]


def report_what_is_held(model, args) -> None:
    fc, dim = model.module.fc, args.model_parallel_dim
    split = {None: [], 0: [fc.weight]}.get(dim, [fc.weight, fc.bias])
    whole = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in split)
    own = torch.tensor([sum(p.numel() for p in split)])
    if torch.cuda.is_available():
        own = own.cuda()
    parts = ts.distributed.gather(own, dim=0).tolist()
    total = whole + sum(parts)
    say(f"{args.arch}, {args.classes} classes: {total:,} parameters, of which every rank holds {whole:,}")
    if split:
        say(f"the last layer is split along {args.model_parallel_dim}: {', '.join(f'{n:,}' for n in parts)} by rank")
    say(f"momenta: {'one rank for each whole parameter (ZeRO)' if args.zero else 'as the parameters'}")


def datasets(args):
    if args.folder is None:
        args.classes = args.classes or 1000
        train_set = GeneratedImages(args.samples, args.image_size, args.classes, args.seed)
        return train_set, GeneratedImages(max(1, args.samples // 4), args.image_size, args.classes, args.seed + 1)
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise SystemExit("reading images from a folder needs Pillow: pip install pillow") from None
    for part in ("train", "val"):
        if not (args.folder / part).is_dir():
            raise SystemExit(f"{args.folder} has no folder {part!r}: expected {part}/CLASS/IMAGE in it")
    train_set = ImageFolder(args.folder / "train", args.image_size)
    args.classes = args.classes or train_set.num_classes
    if train_set.num_classes > args.classes:
        raise SystemExit(f"--classes {args.classes} was given for a folder with images of {train_set.num_classes}")
    return train_set, ImageFolder(args.folder / "val", args.image_size)


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} was given: use a whole number from 1")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="images; generated ones without it")
    parser.add_argument("--arch", default="resnet50", choices=ARCHITECTURES)
    parser.add_argument("--classes", type=positive, help="default: those of the folder, or 1000")
    parser.add_argument("--model-parallel-dim", type=int, choices=[-1, 0, 1], help="how the last layer is split")
    parser.add_argument("--image-size", type=positive, default=224)
    parser.add_argument("--samples", type=positive, default=1024, help="generated images of an epoch")
    parser.add_argument("--epochs", type=positive, default=90)
    parser.add_argument("--batch-size", type=positive, default=256, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--amp", action="store_true", help="bf16 on CPUs, fp16 with loss scaling on GPUs")
    parser.add_argument("--zero", action="store_true", help="torch's ZeroRedundancyOptimizer")
    parser.add_argument("--save", help="file to write after every epoch")
    parser.add_argument("--resume", help="file to go on from")
    parser.add_argument("--evaluate", action="store_true", help="only validate")
    parser.add_argument("--workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--print-every", type=positive, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
