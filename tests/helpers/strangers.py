"""Models written as people write them elsewhere: what they keep, share, read and draw is not only in modules."""

import copy
import math
import random
import threading
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tensorshard as ts

WIDTH = 16
STEPS = 3
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


class Net(nn.Module):
    """Residual blocks between two linear layers, on [samples, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList([self.block() for _ in range(4)])
        self.outlet = nn.Linear(WIDTH, 3)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = h + block(h)
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.body(self.inlet(x)))


# -- what blocks share --


class OneMaskForAll(Net):
    """One buffer is registered in every block, and read between them."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.linspace(0.5, 1.5, WIDTH)
        for block in self.blocks:
            block.register_buffer("mask", mask)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = h + torch.tanh(block(h)) * block.mask
        return h


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.table


class OneModuleForAll(Net):
    """A module without parameters is registered in every block, as rotary tables often are."""

    def __init__(self) -> None:
        self.table = None
        super().__init__()

    def block(self) -> nn.Module:
        if self.table is None:
            vars(self)["table"] = Table()
        return nn.Sequential(vars(self)["table"], *super().block())


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return h * (1 + 0.01 * self.calls)


class OneCounterForAll(Net):
    """Blocks count their calls in one buffer: all of them must be on one stage."""

    def __init__(self) -> None:
        super().__init__()
        counter = Counter()
        for index, block in enumerate(self.blocks):
            self.blocks[index] = nn.Sequential(counter, *block)


class RegisteredTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = self.blocks[0], self.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.body(self.first(self.inlet(x))))


class ActivationOfAll(Net):
    """A default argument is one module for all models of a process."""

    def __init__(self, activation: nn.Module = nn.SiLU()) -> None:  # noqa: B008
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(b[0], activation, b[2]) for b in self.blocks)


# -- code in attributes --


class Lambdas(Net):
    def __init__(self) -> None:
        super().__init__()
        self.steps = [lambda h, inner=block: inner(h) for block in self.blocks[:2]]
        self.others = {"a": self.blocks[2].forward, "b": partial(nn.Sequential.forward, self.blocks[3])}

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for step in (*self.steps, *self.others.values()):
            h = h + step(h)
        return h


class Objects(Net):
    """Attributes that nothing can copy, or that have a state of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.math, self.lock, self.stream = math, threading.Lock(), (i for i in range(9))
        self.generator = torch.Generator().manual_seed(5)
        self.table = torch.linspace(-1, 1, WIDTH)
        for block in self.blocks:
            block.parent = [self]

    def body(self, h: torch.Tensor) -> torch.Tensor:
        with self.lock:
            h = h * self.table + torch.rand(WIDTH, generator=self.generator)
        for block in self.blocks:
            h = h + block(h) * block.parent[0].outlet.bias.mean()
        return h * self.math.cos(0.1)


class Hooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.features: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(lambda m, a, out, index=index: self.features.__setitem__(index, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(self.inlet(x))
        return self.outlet(h + sum(self.features.values()))


# -- state outside of modules --

_TABLES: dict[Any, torch.Tensor] = {}


def _positions(kept: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
    if not kept:
        kept.append(torch.linspace(0, 1, WIDTH))
    return kept[0]


class Caches(Net):
    """Tables in a global dictionary, in an attribute of the class, in a default argument, in a memoized method."""

    scale: torch.Tensor | None = None

    @lru_cache(4)  # noqa: B019
    def bias(self, width: int) -> torch.Tensor:
        return torch.linspace(1, 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if WIDTH not in _TABLES:
            _TABLES[WIDTH] = torch.linspace(0.5, 1.5, WIDTH)
        if Caches.scale is None:
            Caches.scale = torch.linspace(0.5, 2, WIDTH)
        h = self.inlet(x) * _TABLES[WIDTH] * Caches.scale + _positions() + self.bias(WIDTH)
        return self.outlet(self.body(h))


class SeedsItself(Net):
    def __init__(self) -> None:
        torch.manual_seed(1024)
        super().__init__()


class LeavesLayersOut(Net):
    """Layers are left out by Python's random numbers, which stages would draw for themselves."""

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if not self.training or random.random() < 0.7:
                h = h + block(h)
        return h


class AveragesItself(Net):
    """Statistics over all ranks, by a collective of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = False
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(self.inlet(x))
        mean = h.detach().mean(0)
        if dist.is_initialized() and not self.alone:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.mean.lerp_(mean, 0.1)
        return self.outlet(h + self.mean)


# -- weights that others read or write --


class WritesItsWeight(Net):
    def block(self) -> nn.Module:
        class Normalized(nn.Linear):
            def forward(self, h: torch.Tensor) -> torch.Tensor:
                if self.training:
                    with torch.no_grad():
                        self.weight.copy_(F.normalize(self.weight, dim=1))
                return torch.tanh(F.linear(h, self.weight, self.bias))

        return Normalized(WIDTH, WIDTH)


class Teacher(Net):
    """An average of the blocks, updated in forward, teaches them."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for mean, weight in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)
        h = self.inlet(x)
        taught = h
        for block in self.teacher:
            taught = taught + block(taught)
        return self.outlet(self.body(h) + taught.detach())


class ReadsOthers(Net):
    """Code outside of blocks multiplies their weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        merged = self.blocks[0][2].weight @ self.blocks[1][0].weight
        return self.outlet(F.linear(h, merged) + self.body(h))


class KeepsAView(Net):
    def __init__(self) -> None:
        super().__init__()
        self.transposed = self.outlet.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.inlet(x)) @ self.transposed


class OtherWeights(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[0]
        weights = {name: weight * 0.5 for name, weight in block.named_parameters()}
        return self.outlet(self.body(torch.func.functional_call(block, weights, (self.inlet(x),))))


# -- ways of computing --


class Mapped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(torch.vmap(self.body)(self.inlet(x)))


class Filled(Net):
    def body(self, h: torch.Tensor) -> torch.Tensor:
        out = h.new_zeros(len(self.blocks), len(h), WIDTH)
        for index, block in enumerate(self.blocks):
            out[index] = block(h) + (out[index - 1].clone() if index else 0)
        return out.sum(0)


class _Adjoint(torch.autograd.Function):
    """Takes a module's parameters as inputs, and computes their gradients itself, as solvers of equations do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, h: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(h, *parameters)
        with torch.no_grad():
            return module(h)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            output = ctx.module(h)
        found = torch.autograd.grad(output, (h, *parameters), gradient, allow_unused=True)
        return None, *found


class Adjoint(Net):
    def body(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = h + _Adjoint.apply(block, h, *block.parameters())
        return h


class TrainsAlone(Net):
    """Its backward needs what forward keeps in training alone, as reversible blocks do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.kept = torch.get_rng_state()
        h = super().forward(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: torch.set_rng_state(self.kept))
        return h


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.layers(h * self.gain.sqrt())


class TakesRoots(Net):
    """Random numbers in place of a parameter would be outside of the function's domain."""

    def block(self) -> nn.Module:
        return Root()


MODELS = {
    kind.__name__: kind
    for kind in (
        OneMaskForAll, OneModuleForAll, OneCounterForAll, RegisteredTwice, ActivationOfAll, Lambdas, Objects, Hooks,
        Caches, SeedsItself, LeavesLayersOut, AveragesItself, WritesItsWeight, Teacher, ReadsOthers, KeepsAView,
        OtherWeights, Mapped, Filled, Adjoint, TrainsAlone, TakesRoots,
    )
}  # fmt: skip


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.mean(-1) - target).square().mean()


def train(name: str, fields: dict[str, Any]) -> tuple[float, float] | str:
    """The largest differences of a loss and of a weight from one process, on the first rank; or what was refused."""
    try:
        return _train(MODELS[name], ts.Plan(**fields))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _train(model: type[Net], plan: ts.Plan) -> tuple[float, float]:
    given = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 6, generator=given), torch.randn(4, generator=given)) for _ in range(STEPS)]
    if model is ActivationOfAll:  # another model of the process has its activation
        ts.parallelize(model, ts.Plan(), optimizer=ADAMW, loss_fn=loss, device="cpu")
    engine = ts.parallelize(model, plan, optimizer=ADAMW, loss_fn=loss, device="cpu", sample_inputs=batches[0][0])
    mesh, weights = engine.mesh, engine.full_state_dict()
    found = []
    for x, y in batches:
        found.append(float(engine.step(x[mesh.dp_rank :: mesh.dp_size], y[mesh.dp_rank :: mesh.dp_size])))
    trained = engine.full_state_dict()
    if mesh.rank != 0:
        return 0.0, 0.0
    one = model()
    one.load_state_dict(weights)
    one.alone = True
    optimizer, expected = ADAMW([p for p in one.parameters() if p.requires_grad]), []
    parts = plan.micro_batches
    with ts.same_randomness(one) as numbers:
        for x, y in batches:
            losses = []
            for index, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
                numbers.at(index * len(a))
                losses.append(loss(one(a), b) / parts)
            sum(losses).backward()
            expected.append(float(sum(losses)))
            optimizer.step()
            optimizer.zero_grad()
    return (
        max(abs(a - b) for a, b in zip(found, expected, strict=True)),
        max(float((value - trained[name]).abs().max()) for name, value in one.state_dict().items()),
    )
