"""A small mixture of experts on text: each process holds some experts, and tokens travel to those that they choose.

python examples/train_moe.py --ep 1                                 # one process holds all 8 experts of each layer
torchrun --nproc-per-node 2 examples/train_moe.py --ep 2            # each of two holds 4 of them
torchrun --nproc-per-node 4 examples/train_moe.py --ep 2 --pp 2     # and half of the layers
"""

import argparse
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import tensorshard as ts
from tensorshard.data import ShardedBatchSampler, StdlibText
from tensorshard.models import next_token_loss


class Experts(nn.Module):
    """All experts of a layer in two parameters, as the mixtures of transformers hold them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.experts):
            rows, slots = torch.where(chosen == expert)
            made = F.gelu(tokens[rows] @ self.up[expert]) @ self.down[expert]
            result.index_add_(0, rows, made * weights[rows, slots, None])
        return result


class Layer(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        q, k, v = (part.view(samples, length, 4, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        tokens = self.norm_2(x).view(-1, width)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, chosen, weights).view_as(x)


class Mixture(nn.Module):
    """A GPT whose layers have 8 experts, of which each token chooses two."""

    def __init__(self, *, layers: int, width: int = 64, context_length: int = 64, experts: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context_length, width)
        self.layers = nn.ModuleList(Layer(width, experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=2, help="processes that share the experts")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    engine = ts.parallelize(
        partial(Mixture, layers=4),
        ts.Plan(ep=arguments.ep, pp=arguments.pp, micro_batches=arguments.pp, zero=1),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        loss_fn=next_token_loss,
    )
    dataset = StdlibText("train", context_length=64)
    mesh = engine.mesh
    sampler = ShardedBatchSampler(len(dataset), 16, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size, seed=0)
    batches = iter(DataLoader(dataset, batch_sampler=sampler))
    for step in range(1, arguments.steps + 1):
        loss = engine.step(*next(batches))
        if mesh.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    if mesh.rank == 0:
        print(mesh.describe())


if __name__ == "__main__":
    main()
