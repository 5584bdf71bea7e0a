"""Faults that are planted in an Engine, each of one kind: what `verify` has to find and to name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tensorshard.comm.sharding import to_local
from tensorshard.parallelize.build import parallelize

Plant = Callable[[Any], None]

VOCABULARY, TOKENS = 32, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention()
        self.mlp_norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """A language model whose parts have plain names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, VOCABULARY, (samples, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1], drawn[:, 1:]


def _in_gradients(change: Callable[[Any, str, torch.Tensor], None], *, first: bool = True) -> Plant:
    """A fault in the gradients of some parameters, before (or after) they are read."""

    def plant(engine: Any) -> None:
        if first:
            engine.register_gradient_hook(lambda name, gradient: change(engine, name, to_local(gradient)))
            return
        register = engine.register_gradient_hook

        def registering(hook: Any) -> Any:
            handle = register(hook)
            register(lambda name, gradient: change(engine, name, to_local(gradient)))
            return handle

        engine.register_gradient_hook = registering

    return plant


def _scaled(engine: Any, name: str, gradient: torch.Tensor) -> None:
    gradient.mul_(engine.mesh.world_size)


def _own(engine: Any, name: str, gradient: torch.Tensor) -> None:
    if name.endswith("norm.weight"):
        other = torch.linspace(-1, 1, gradient.numel()).view_as(gradient) * gradient.abs().max()
        gradient.add_(other * (1 if engine.mesh.rank % 2 else -1))


def _lost(engine: Any, name: str, gradient: torch.Tensor) -> None:
    if name.startswith("blocks.1.up"):
        gradient.zero_()


def _rounded(engine: Any, name: str, gradient: torch.Tensor) -> None:
    gradient.copy_(gradient.to(torch.bfloat16))


def _halved(engine: Any, name: str, gradient: torch.Tensor) -> None:
    gradient.mul_(0.5)


def _in_batches(change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Plant:
    def plant(engine: Any) -> None:
        step = engine.step
        engine.step = lambda inputs, targets: step(*change(engine, inputs, targets))

    return plant


def _same_samples(engine: Any, inputs: Any, targets: Any) -> Any:
    half = inputs.shape[0] // 2
    return torch.cat([inputs[:half], inputs[:half]]), torch.cat([targets[:half], targets[:half]])


def _shifted(engine: Any, inputs: Any, targets: Any) -> Any:
    return inputs, targets.roll(1, 1)


def _in_forward(module: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(engine: Any) -> None:
        found = dict(engine.model.named_modules()).get(module)
        if found is not None:  # on this stage
            found.register_forward_hook(lambda _, __, output: change(output))

    return plant


def _dropped(output: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(output, 0.3)


def _initial(engine: Any) -> None:
    for name, parameter in engine.model.named_parameters():
        if name == "blocks.0.up.weight":
            to_local(parameter).data.mul_(1.1)


def _stale(engine: Any) -> None:
    name = "blocks.1.attention.value.weight"
    parameter = dict(engine.model.named_parameters()).get(name)
    kept = None if parameter is None else to_local(parameter).detach().clone()
    step = engine.step

    def stepping(inputs: Any, targets: Any) -> Any:
        loss = step(inputs, targets)
        if kept is not None:
            with torch.no_grad():
                to_local(parameter).copy_(kept)
        return loss

    engine.step = stepping


def _faster(engine: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= 2


def _unmasked(engine: Any) -> None:
    found = dict(engine.model.named_modules()).get("blocks.0.attention")
    if found is None:
        return

    def forward(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (found.query, found.key, found.value))
        return found.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    found.forward = forward


def _larger(output: torch.Tensor) -> torch.Tensor:
    return output + 0.1 * output.abs()


FAULTS: dict[str, tuple[Plant, str]] = {
    "every gradient times the ranks": (_in_gradients(_scaled), "scaled"),
    "norms' gradients are each rank's own": (_in_gradients(_own), "not reduced"),
    "a layer's gradient is lost": (_in_gradients(_lost), "gradient"),
    "gradients rounded to bf16": (_in_gradients(_rounded), "precision"),
    "clipped once more": (_in_gradients(_halved, first=False), "norm"),
    "half of the samples twice": (_in_batches(_same_samples), "other samples"),
    "labels shifted": (_in_batches(_shifted), "labels"),
    "a layer's output larger": (_in_forward("blocks.1.up", _larger), "forward"),
    "dropout where there is none": (_in_forward("blocks.0.up", _dropped), "other random numbers"),
    "a causal mask is dropped": (_unmasked, "mask"),
    "another initial weight": (_initial, "other random numbers"),
    "a weight that stays": (_stale, "stale weights"),
    "twice the learning rate": (_faster, "update"),
}
"""By name: what plants it, and the kind that it is."""


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Inside, `verify` plants a fault in every Engine of more ranks than one."""

    def laying_out(*args: Any, **kwargs: Any) -> Any:
        engine = parallelize(*args, **kwargs)
        if engine.mesh.world_size > 1:
            plant(engine)
        return engine

    verification: Any = import_module("tensorshard.verify.verify")
    verification.parallelize = laying_out
    try:
        yield
    finally:
        verification.parallelize = parallelize
