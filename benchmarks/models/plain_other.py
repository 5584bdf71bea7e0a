"""Recommenders, point clouds, graphs, flows and others, as people write them by hand."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.batches import CLASSES, Batches, class_loss, number_loss, numbers, several
from benchmarks.models.case import Batch, Case, Loss


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """A bottom MLP, an embedding a feature, products of all pairs, a top MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = mlp(8, 32, 16)
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(4))
        self.top = mlp(16 + 10, 32, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(table(sparse[:, i : i + 1]) for i, table in enumerate(self.tables))], 1)
        pairs = features @ features.transpose(1, 2)
        rows, columns = torch.triu_indices(5, 5, 1, device=x.device)
        return self.top(torch.cat([x, pairs[:, rows, columns]], 1))[:, 0]


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.embed = nn.Linear(8, 1), nn.Embedding(50, 8)
        self.deep = mlp(8 + 4 * 8, 64, 32, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        deep = self.deep(torch.cat([dense, self.embed(sparse).flatten(1)], 1))
        return (self.wide(dense) + deep)[:, 0]


class PointNet(nn.Module):
    """A learned transform of the points, a shared MLP as convolutions of width one, a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
        self.matrix = nn.Linear(32, 9)
        self.shared = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64)
        )
        self.head = mlp(64, 32, CLASSES)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        turn = self.matrix(self.transform(points).amax(2)).view(-1, 3, 3) + torch.eye(3, device=points.device)
        return self.head(self.shared(turn.to(points.dtype) @ points).amax(2))


class GraphLayer(nn.Module):
    """Graph attention over a dense adjacency."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin, self.left, self.right = nn.Linear(inputs, outputs), nn.Linear(outputs, 1), nn.Linear(outputs, 1)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        h = self.lin(x)
        scores = F.leaky_relu(self.left(h) + self.right(h).transpose(1, 2), 0.2)
        return F.elu(scores.masked_fill(adjacency == 0, -1e4).softmax(-1) @ h)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GraphLayer(8, 32), GraphLayer(32, 32), GraphLayer(32, 32)])
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, adjacency)
        return self.head(x.mean(1))


class Coupling(nn.Module):
    """RealNVP's affine coupling, with its log-determinant."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip, self.net = flip, mlp(8, 32, 32, 16)

    def forward(self, x: torch.Tensor, log_det: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.chunk(2, 1)
        a, b = (b, a) if self.flip else (a, b)
        scale, shift = self.net(a).chunk(2, 1)
        scale = torch.tanh(scale)
        b = b * scale.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], 1), log_det + scale.sum(1)


class RealNVP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(bool(i % 2)) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log_det = x.new_zeros(x.shape[0])
        for coupling in self.couplings:
            x, log_det = coupling(x, log_det)
        return 0.5 * x.square().sum(1) - log_det


def flow_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood; targets are not used."""
    return output.mean() + 0.0 * targets.sum()


class NeRF(nn.Module):
    """Positions and directions under sines, an MLP with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(24, 64, 64), mlp(64 + 24, 64, 64)
        self.density, self.color = nn.Linear(64, 1), mlp(64 + 24, 32, 3)
        self.register_buffer("frequencies", 2.0 ** torch.arange(4))

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        angles = (x[..., None] * self.frequencies).flatten(-2)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, position: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        p, d = self._encode(position), self._encode(direction)
        h = self.second(torch.cat([F.relu(self.first(p)), p], -1))
        return torch.cat([F.softplus(self.density(h)), torch.sigmoid(self.color(torch.cat([h, d], -1)))], -1)


class LoRALinear(nn.Module):
    """A frozen linear with a trained correction of rank 4."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(0.1 * torch.randn(4, inputs)), nn.Parameter(torch.zeros(outputs, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Codebook(nn.Module):
    """Vector quantisation with a straight-through gradient, whose forward counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(16, 32, 8), mlp(8, 32, 16)
        self.codes = nn.Parameter(torch.randn(12, 8))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        z = self.encode(x)
        nearest = self.codes[torch.cdist(z.detach(), self.codes.detach()).argmin(1)]
        return self.decode(z + (nearest - z.detach())) + 0.1 * (nearest - z).square().sum(1, keepdim=True)


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = mlp(8, 64, 64), mlp(64, 64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rho(self.phi(x).sum(1))


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(3 * x)


class EarlyExit(nn.Module):
    """Blocks after which it stops if its confidence, a value of the data, is high: never, on the data here."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(16, 64, 16) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(16, CLASSES) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = x
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = x + block(x)
            logits = leave(x) if leave is self.exits[0] else logits + leave(x)
            if logits.softmax(-1).amin() > 0.9:
                break
        return logits


class VideoClassifier(nn.Module):
    """A video classifier of 3-D convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2),
            nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3, 4)))


def _recommendations(samples: int, generator: torch.Generator) -> Batch:
    dense = torch.randn(samples, 8, generator=generator)
    sparse = torch.randint(0, 50, (samples, 4), generator=generator)
    return (dense, sparse), torch.randn(samples, generator=generator)


def _graphs(samples: int, generator: torch.Generator) -> Batch:
    x = torch.randn(samples, 10, 8, generator=generator)
    adjacency = torch.randint(0, 2, (samples, 10, 10), generator=generator) | torch.eye(10, dtype=torch.long)
    return (x, adjacency), torch.randint(0, CLASSES, (samples,), generator=generator)


def _case(name: str, build: Callable[[], nn.Module], batch: Batches, loss: Loss = class_loss) -> Case:
    return Case(name, "plain", build, batch, loss, "other")


_classes = numbers(16, targets="classes")

CASES = [
    _case("MLP", lambda: mlp(16, 64, 64, 64, CLASSES), _classes),
    _case("DLRM", DLRM, _recommendations, number_loss),
    _case("wide-and-deep", WideAndDeep, _recommendations, number_loss),
    _case("PointNet", PointNet, numbers(3, 20, targets="classes")),
    _case("graph-attention", GraphNet, _graphs),
    _case("RealNVP", RealNVP, numbers(16), flow_loss),
    _case("NeRF", NeRF, several({"position": (3,), "direction": (3,)}), number_loss),
    _case("LoRA", lambda: nn.Sequential(LoRALinear(16, 64), nn.ReLU(), LoRALinear(64, CLASSES)), _classes),
    _case("vector-quantisation", Codebook, numbers(16), number_loss),
    _case("DeepSets", DeepSets, numbers(6, 8, targets="classes")),
    _case("SIREN", lambda: mlp(2, 64, 64, 3, activation=Sine), numbers(2), number_loss),
    _case("early-exit", EarlyExit, _classes),
    _case("3-D-convolutions", VideoClassifier, numbers(3, 4, 8, 8, targets="classes")),
]
