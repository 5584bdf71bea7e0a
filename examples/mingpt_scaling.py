"""How large a GPT can be trained if its layers are split over N ranks; TorchShard's minGPT project asks this.

torchrun --nproc-per-node 2 examples/mingpt_scaling.py --layers 2 4 --widths 128 256
torchrun --nproc-per-node 8 examples/mingpt_scaling.py --layers 12 24 64 --widths 256 1024 --model-parallel 8 --amp

Ranks of a model-parallel group read the same tokens. The groups are data parallel. The losses are those of one device,
whatever --model-parallel is.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import tensorshard as ts
from tensorshard.data import StdlibText
from tensorshard.utils.data import DistributedGroupSampler

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    """Causal attention, with heads split over the group: by the columns of `kqv`, then by the rows of `project`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.kqv = ts.nn.ParallelLinear(width, 3 * width, dim=1)
        self.project = ts.nn.ParallelLinear(width, width, dim=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # The k, q and v of each head are side by side, so a part of the columns is a part of the heads.
        kqv = self.kqv(x).view(batch, length, -1, 3 * self.head_width).transpose(1, 2)
        k, q, v = ts.slice(kqv, 3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        return self.project(ts.register_parallel_dim(y, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            ts.nn.ParallelLinear(width, 4 * width, dim=1),
            nn.GELU(),
            ts.nn.RegisterParallelDim(-1),
            ts.nn.ParallelLinear(4 * width, width, dim=0),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MinGPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = ts.nn.ParallelEmbedding(VOCABULARY, width, dim=0)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = ts.nn.ParallelLinear(width, VOCABULARY, bias=False, dim=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.size(1)]
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    args = parse_arguments()
    ts.init_process_group(args.model_parallel)
    group_size, groups = ts.distributed.get_group_size(), ts.distributed.get_data_parallel_size()
    if args.batch_size % groups:
        raise SystemExit(f"--batch-size {args.batch_size} is that of all {groups} groups: use a multiple of them")
    for width in args.widths:
        if args.heads % group_size or width % args.heads:
            raise SystemExit(
                f"width {width} and {args.heads} heads on groups of {group_size}: the heads must divide the width, and "
                "the ranks of a group the heads"
            )
    say(f"{dist.get_world_size()} ranks: {groups} data-parallel groups of {group_size} that split the model")
    say(f"{'layers':>6} {'width':>6} {'parameters':>14} {'this rank':>14} {'bytes/rank':>14} {'s/step':>8} {'loss':>8}")
    for layers in args.layers:
        for width in args.widths:
            say(" ".join(measure(layers, width, args)))
    dist.destroy_process_group()


def measure(layers: int, width: int, args: argparse.Namespace) -> list[str]:
    """Trains one model for a few steps. Returns the columns of its line."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(args.seed)  # the same on every rank: parallel layers keep their parts of the same weights
    model = MinGPT(layers, width, args.heads, args.context).to(device)
    split = ts.register_ddp_parameters_to_ignore(model)
    ddp = DistributedDataParallel(model)
    criterion = ts.nn.ParallelCrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp)

    dataset = StdlibText("train", context_length=args.context)
    sampler = DistributedGroupSampler(dataset, seed=args.seed, drop_last=True)
    batch_size = args.batch_size // ts.distributed.get_data_parallel_size()
    loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)
    if len(loader) < args.steps:
        raise SystemExit(f"--steps {args.steps}: the text has {len(loader)} batches of --batch-size {args.batch_size}")
    seconds = []
    for _, (tokens, targets) in zip(range(args.steps), loader, strict=False):
        start = time.perf_counter()
        with torch.autocast(device.type, enabled=args.amp):
            loss = criterion(ddp(tokens.to(device)), targets.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = ts.distributed.reduce(loss.detach(), ts.distributed.get_data_parallel_group())
        value = mean.item() / ts.distributed.get_data_parallel_size()  # this also waits for the device
        seconds.append(time.perf_counter() - start)

    own = sum(p.numel() for p in model.parameters())
    own_split = sum(p.numel() for name, p in model.named_parameters() if name in split)
    whole = own - own_split + ts.distributed.reduce(torch.tensor(own_split, device=device)).item()
    return [
        f"{layers:>6} {width:>6} {whole:>14,} {own:>14,}",
        # Parameters, gradients and Adam's two averages; on a GPU, the peak of allocated memory.
        f"{16 * own if device.type == 'cpu' else torch.cuda.max_memory_allocated():>14,}",
        f"{statistics.median(seconds[1:] or seconds):>8.3f} {value:>8.4f}",
    ]


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} was given: use a whole number from 1")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, nargs="+", default=[12])
    parser.add_argument("--widths", type=positive, nargs="+", default=[256])
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--model-parallel", type=positive, help="ranks of a group; all by default")
    parser.add_argument("--context", type=positive, default=128)
    parser.add_argument("--batch-size", type=positive, default=16, help="of all groups together")
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--amp", action="store_true", help="bf16 on CPUs, fp16 with loss scaling on GPUs")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
