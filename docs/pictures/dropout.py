"""Measures what dropout.svg shows: ``python docs/pictures/dropout.py`` writes dropout.json anew, in some minutes.

A small language model with dropout trains on the same batches under five layouts of tensorshard, and of torch's FSDP2
and tensor parallelism, as their tutorials write them. Each starts from the same weights and the same seed.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import tensorshard as ts

WORDS, WIDTH, HEADS, LAYERS, TOKENS, SAMPLES, STEPS = 32, 32, 4, 2, 32, 8, 60
RATE, HIGHEST = 0.2, 3e-3  # of dropout, and the learning rate
ADAMW = partial(torch.optim.AdamW, lr=HIGHEST)
OURS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "zero=3 on 4": (4, dict(zero=3)),
    "tp=2": (2, dict(tp=2, sequence_parallel=True)),
    "pp=2": (2, dict(pp=2, micro_batches=4)),
    "cp=2, zero=1 on 4": (4, dict(cp=2, zero=1)),
}
TORCHS = {  # data ranks, tensor-parallel ranks
    "1 process": (1, 1),
    "FSDP2 on 2": (2, 1),
    "FSDP2 on 4": (4, 1),
    "tp=2": (1, 2),
    "FSDP2 x tp=2": (2, 2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        q, k, v = (layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=RATE if self.training else 0.0, is_causal=True)
        x = x + self.drop(self.o(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.between(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.drop = nn.Dropout(RATE)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.words(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batches() -> list[torch.Tensor]:
    """Sequences that go on by a step of their own, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        first, step = (
            torch.randint(low, high, (SAMPLES, 1), generator=generator) for low, high in ((0, WORDS), (1, 4))
        )
        found.append((first + step * torch.arange(TOKENS + 1)) % WORDS)
    return found


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ours(fields: dict[str, Any]) -> list[float]:
    """The losses of a run under a plan."""
    engine = ts.parallelize(build, ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_of, device="cpu")
    mesh, losses = engine.mesh, []
    for batch in batches():
        mine = batch.chunk(mesh.dp_size)[mesh.dp_rank]
        losses.append(engine.step(mine[:, :-1], mine[:, 1:]).item())
    return losses


def torchs(data: int, tensor: int) -> list[float]:
    """The losses of a run on data ranks x tensor-parallel ranks."""
    if data * tensor > 1:
        dist.init_process_group("gloo")
    model, rank = build(), 0
    if data * tensor > 1:
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
        rank = mesh.get_local_rank("data")
        if tensor > 1:
            columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
            for block in model.blocks:
                parallelize_module(
                    block, mesh["tensor"], {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()}
                )
        if data > 1:
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh["data"])
    optimizer = ADAMW(model.parameters())
    torch.manual_seed(1)
    losses = []
    for batch in batches():
        mine = batch.chunk(data)[rank]
        loss = loss_of(model(mine[:, :-1]), mine[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if data > 1:
            dist.all_reduce(mean, group=mesh["data"].get_group())
        losses.append((mean / data).item())
    return losses


def main() -> None:
    found = {
        "tensorshard": {
            name: ts.notebook_launch(partial(ours, fields), ranks=n)[0] for name, (n, fields) in OURS.items()
        },
        "torch": {name: ts.notebook_launch(partial(torchs, *n), ranks=n[0] * n[1])[0] for name, n in TORCHS.items()},
    }
    rounded = {
        side: {name: [float(f"{x:.8g}") for x in run] for name, run in runs.items()} for side, runs in found.items()
    }
    path = Path(__file__).with_name("dropout.json")
    path.write_text(json.dumps({"torch_version": torch.__version__.partition("+")[0], "runs": rounded}) + "\n")


if __name__ == "__main__":
    main()
