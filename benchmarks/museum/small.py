"""The small models and batches that the exhibits share. Everything is fp64, so that rounding hides nothing."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

Trained = tuple[nn.Module, Callable[[int], Any]]


class Net(nn.Module):
    """Two linear layers with a norm between them: 8 features in, 4 out, 252 parameters."""

    def __init__(self, *, bias: bool = True, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, bias=bias)
        self.norm = norm(16)
        self.last = nn.Linear(16, 4, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))


class Words(nn.Module):
    """A language model without attention: it sees one token and says the next. Its logits are flat: a row a token."""

    def __init__(self, vocabulary: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens.flatten()))))


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model with the weights that the seed gives, in fp64."""
    torch.manual_seed(seed)
    return build().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: inputs of shape (8, 8) and targets of shape (8, 4)."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(8, 4, generator=generator, dtype=torch.float64)


def padded_tokens(step: int, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens and targets of shape (samples, 8); of sample i the first `lengths[i]` targets count, others are -100."""
    generator = torch.Generator().manual_seed(200 + step)
    tokens = torch.randint(24, (len(lengths), 9), generator=generator)
    ignored = torch.arange(8) >= torch.tensor(lengths)[:, None]
    return tokens[:, :-1], tokens[:, 1:].masked_fill(ignored, -100)


def token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy over the targets that are not -100."""
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction=reduction)


def share(tensor: Tensor) -> Tensor:
    """This rank's samples of a global batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def mesh(*sizes: int, names: tuple[str, ...] = ("ranks",)) -> DeviceMesh:
    """A mesh of CPU ranks; by default all of them along one axis."""
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=names)


def average_gradients(model: nn.Module) -> None:
    """Replaces each gradient by its mean over the ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[int], Tensor], *, clip: float | None = None
) -> Trained:
    """The model and its step: gradients from `backward`, which returns the loss, then clipping and one update."""

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = backward(number)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return model, step


def squared_error(model: nn.Module, number: int, *, own: bool = False) -> Tensor:
    """The loss on the batch of a step, or on this rank's share of it, after its backward pass."""
    inputs, targets = batch(number)
    if own:
        inputs, targets = share(inputs), share(targets)
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, whose updates grow and shrink with the gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(build: Callable[[], nn.Module] = Net) -> Trained:
    """The model trained on one process by SGD."""
    model = seeded(build)
    return train(model, sgd(model), lambda number: squared_error(model, number))


def on_own_share(model: nn.Module) -> Trained:
    """The model trained on this rank's share of each batch; the model itself sees to its gradients."""
    return train(model, sgd(model), lambda number: squared_error(model, number, own=True))
