"""Small language models whose blocks are built in ways of their own: forwards, latent attention, scans, parameters."""

import torch
from torch import nn
from torch.nn import functional as F

import seeds

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 31, 8
HEAD = WIDTH // HEADS


class OwnLinear(nn.Linear):
    """A linear layer that multiplies in its own forward, as Falcon's does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


class NormalizingLinear(nn.Linear):
    """A linear layer whose outputs depend on all of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * WIDTH**0.5


class OffsetPositions(nn.Embedding):
    """Positions that the forward makes from a length, two rows being for something else."""

    def forward(self, length: int) -> torch.Tensor:
        return super().forward(torch.arange(length, device=self.weight.device) + 2)


class OwnForwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = OwnLinear(WIDTH, 2 * WIDTH), OwnLinear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class LatentAttention(nn.Module):
    """Keys and values from one narrow layer, which also makes a key that all heads share (DeepSeek-AI 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * 2 * HEAD)
        self.narrow, self.norm = nn.Linear(WIDTH, 8 + HEAD), nn.RMSNorm(8)
        self.wide, self.out = nn.Linear(8, HEADS * 2 * HEAD), nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (-1, 2 * HEAD)).transpose(1, 2)
        latent, shared = self.narrow(x).split((8, HEAD), -1)
        wide = self.wide(self.norm(latent)).unflatten(-1, (-1, 2 * HEAD)).transpose(1, 2)
        own, v = wide.chunk(2, -1)
        k = torch.cat([own, shared.unsqueeze(1).expand_as(own)], -1)
        return x + self.out(_attend(q, k, v))


class Sinks(nn.Module):
    """Attention of which each head may attend to nothing, and experts with biases (gpt-oss)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2)
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.experts(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.randn(2, WIDTH, 24) / 4), nn.Parameter(torch.randn(2, 24))
        self.down, self.down_bias = nn.Parameter(torch.randn(2, 24, WIDTH) / 4), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bth,ehf->btef", x, self.up) + self.up_bias
        return (torch.einsum("btef,efh->bteh", hidden.relu(), self.down) + self.down_bias).mean(2)


class Scan(nn.Module):
    """A state per channel, whose step and inputs come from a row layer; some layers are not called (Mamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.filter = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, groups=2 * WIDTH)
        self.select, self.step = nn.Linear(2 * WIDTH, 4 + 6, bias=False), nn.Linear(4, 2 * WIDTH)
        self.decay, self.skip = nn.Parameter(torch.randn(2 * WIDTH, 3)), nn.Parameter(torch.randn(2 * WIDTH))
        self.leave = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, gate = self.enter(self.norm(x)).chunk(2, -1)
        padded = F.pad(inner.transpose(1, 2), (2, 0))
        inner = F.conv1d(padded, self.filter.weight, self.filter.bias, groups=padded.size(1)).transpose(1, 2)
        steps, written, read = self.select(inner).split((4, 3, 3), -1)
        steps = F.softplus((self.step.weight @ steps.transpose(1, 2)).transpose(1, 2) + self.step.bias)
        state, outputs = inner.new_zeros(inner.size(0), inner.size(2), 3), []
        for t in range(x.size(1)):
            kept = torch.exp(-steps[:, t, :, None] * self.decay.exp())
            state = kept * state + (steps[:, t] * inner[:, t]).unsqueeze(-1) * written[:, t, None]
            outputs.append((state * read[:, t, None]).sum(-1) + self.skip * inner[:, t])
        return x + self.leave(torch.stack(outputs, 1) * F.silu(gate))


class BiasedAttention(nn.Module):
    """Its scores are given a learned bias for each head, of which it counts none (MPNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = WIDTH
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], self.features))


class IndexedBias(nn.Module):
    """A bias by distance and head, looked up by an index that is a buffer. Where the heads of one rank reshape the full
    table, the index finds the rows of others, which no shape shows (Swin v2)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.bias = nn.Sequential(nn.Linear(1, 8), nn.ReLU(inplace=True), nn.Linear(8, HEADS))
        positions = torch.arange(LENGTH)
        self.distances = nn.Buffer(torch.linspace(-2, 2, 2 * LENGTH - 1).unsqueeze(1), persistent=False)
        self.index = nn.Buffer(positions - positions.unsqueeze(1) + LENGTH - 1, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        bias = self.bias(self.distances).view(-1, self.heads)[self.index].movedim(-1, 0)
        mixed = torch.softmax(q @ k.transpose(-1, -2) + bias.sin(), -1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Interleaved(nn.Module):
    """Attention whose features no part of a rank can be: neighbours are of different heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x.roll(1, -1)).unflatten(-1, (HEAD, HEADS, 3)).permute(4, 0, 3, 1, 2).softmax(-1)
        return x + self.out(_attend(q, k, v).cumsum(-1))


class ReadsLayers(nn.Module):
    """Attention that multiplies by its layers' weights itself (Swin, BEiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = F.linear(x, self.qkv.weight, self.qkv.bias).view(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        return x + F.linear(_attend(*qkv), self.out.weight, self.out.bias)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rnn(x)[0]


class Own(nn.Module):
    """Attention of parameters, without a layer (XLNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, WIDTH, HEADS, HEAD) / 4)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.einsum("bth,shnd->sbntd", x, self.qkv)
        return x + torch.tanh(self.out(_attend(q, k, v)))


BLOCKS: dict[str, type[nn.Module]] = {
    "own-forwards": OwnForwards,
    "latent": LatentAttention,
    "sinks": Sinks,
    "scan": Scan,
    "biased": BiasedAttention,
    "indexed-bias": IndexedBias,
    "interleaved": Interleaved,
    "reads-layers": ReadsLayers,
    "recurrent": Recurrent,
    "parameters": Own,
}


class Model(nn.Module):
    """Two blocks between a scaled embedding and an output layer that has the same weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = ScaledEmbedding(VOCABULARY, WIDTH, padding_idx=0)
        self.positions = OffsetPositions(24, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH)) if kind == "biased" else None
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(tokens.size(1))
        for block in self.blocks:
            x = block(x) if self.bias is None else block(x, self.bias.unsqueeze(0))
        return self.head(self.norm(x))


def build(kind: str) -> Model:
    """The model of one of `BLOCKS`, its weights the same every time."""
    seeds.seed(3)
    return Model(kind)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the ones that follow them."""
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=seeds.generator(step))
    return tokens[:, :-1], tokens[:, 1:].contiguous()
