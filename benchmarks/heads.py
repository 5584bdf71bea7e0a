"""The work that contenders for a classifier's head share: one step of training its last layer and its loss."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorshard.comm.sharding import shard_range

_SEED = 0
_CHUNK = 1 << 14  # rows that are drawn at a time
LEARNING_RATE, MOMENTUM = 0.1, 0.9


@dataclass(frozen=True)
class HeadWork:
    """A head and its batch.

    Args:
        name: of the work.
        samples: of a step, the same on every rank.
        features: of a sample.
        classes: of all ranks.
        device: where all of it is: "cpu" or "cuda".
        dtype: of the features, a type's name in torch; also the type of matrix products.
    """

    name: str
    samples: int
    features: int
    classes: int
    device: str = "cpu"
    dtype: str = "float32"

    def batch(self) -> tuple[Tensor, Tensor]:
        """Features [samples, features], whose gradient is wanted as within a model, and targets [samples]."""
        generator = torch.Generator(self.device).manual_seed(_SEED)
        features = torch.randn(self.samples, self.features, generator=generator, device=self.device)
        targets = torch.randint(self.classes, (self.samples,), generator=generator, device=self.device)
        return features.to(getattr(torch, self.dtype)).requires_grad_(), targets

    def first_class(self, rank: int, world_size: int) -> int:
        """The first class that `rank` holds."""
        return shard_range(self.classes, world_size, rank)[0]

    def weight(self, rank: int, world_size: int, dtype: str = "float32") -> Tensor:
        """Initial rows of the classes that `rank` holds."""
        count = shard_range(self.classes, world_size, rank)[1]
        rows = torch.empty(count, self.features, device=self.device, dtype=getattr(torch, dtype))
        self.fill(rows, rank, world_size)
        return rows

    def fill(self, rows: Tensor, rank: int, world_size: int) -> None:
        """Writes the initial rows that `rank` holds into `rows`, of any type, with no room for a second copy."""
        generator = torch.Generator(self.device).manual_seed(_SEED + 1 + self.first_class(rank, world_size))
        for part in rows.split(_CHUNK):
            drawn = torch.randn(part.shape, generator=generator, device=self.device)
            part.copy_(drawn.mul_(self.features**-0.5))

    def autocast(self) -> AbstractContextManager[None]:
        """What forward runs in: matrix products of the features' type, whatever the weight's is."""
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device, getattr(torch, self.dtype))


@dataclass(frozen=True)
class Head:
    """A contender that was built.

    Args:
        step: takes features and targets, updates the weight by SGD with momentum, leaves the features' gradient in
            ``features.grad``, and returns the loss.
        weight: this rank's rows.
        states: what is held from step to step, the weight among it.
    """

    step: Callable[[Tensor, Tensor], Tensor]
    weight: Tensor
    states: Callable[[], list[Tensor]]


def with_sgd(
    work: HeadWork, weight: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor], local: Tensor | None = None
) -> Head:
    """A head that torch's own SGD trains.

    Args:
        weight: a leaf that `loss_of` reads.
        loss_of: features and targets to the loss.
        local: this rank's rows, where `weight` is a DTensor.
    """
    optimizer = torch.optim.SGD([weight], lr=LEARNING_RATE, momentum=MOMENTUM)

    def step(features: Tensor, targets: Tensor) -> Tensor:
        with work.autocast():
            loss = loss_of(features, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def states() -> list[Tensor]:
        tensors = [weight, *(value["momentum_buffer"] for value in optimizer.state.values())]
        return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]

    return Head(step, weight.detach() if local is None else local, states)
