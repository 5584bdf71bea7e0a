"""How long operators take on this machine's CPU: small networks of usual layers take steps, and each call is timed.

A roofline has two numbers for a processor. How much of them a kernel reaches depends on the kernel (a convolution of
few pixels, a softmax, a sum over rows) and on its size (caches, threads, blocks of a product). On a CPU it varies by up
to ten times. So each operator has a curve: the seconds that calls of several sizes took, and the roofline's seconds for
the same calls. Here the roofline of products and convolutions is the sum of its two parts, since a core waits for
memory between blocks of them: with the longer part alone, calls with few operations a byte would be off by two.
"""

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tensorshard.predict.hardware import Curve, Rates
from tensorshard.predict.operations import FORWARD, Kernel
from tensorshard.predict.operator_costs import cost_of
from tensorshard.predict.step_time import roofline
from tensorshard.torch_private.dispatch import TorchDispatchMode

_STEPS = 3  # the fewest steps of each network that are timed
_SECONDS = 0.5  # the shortest time that each network is timed
_POINTS = 16  # the most points of a curve
_LAUNCH = 2e-5  # seconds of a call that may be its launch; all beyond is the kernel's own time
_WIDTH = 256
_CLASSES = 1024


class _Timer(TorchDispatchMode):
    """Times every call of an operator, in seconds of this thread's processor time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Kernel, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        begin = time.thread_time()
        output = func(*args, **kwargs)
        seconds = time.thread_time() - begin
        cost = cost_of(func, args, kwargs, output)
        if cost is not None:
            self.calls.append((Kernel(FORWARD, str(func.overloadpacket), cost.dtype, cost.flops, cost.nbytes), seconds))
        return output


def with_operators(rates: Rates) -> Rates:
    """`rates` with a curve for each operator of the networks: pairs in ascending order, of the roofline's seconds and
    the seconds of a call.

    Up to 20 us that a call takes at any size are left out of the curve. They are a part of ``Rates.launch``.
    """
    rates = replace(rates, operators={}, memory_beside=True)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step in _networks():
        for kernel, seconds in _timed(step):
            found[kernel.name].append((roofline(kernel, rates), seconds))
    return replace(rates, operators={name: _curve(points) for name, points in found.items()})


def _timed(step: Callable[[], object]) -> list[tuple[Kernel, float]]:
    """The calls of a step, each with the median of its times in several steps.

    The shortest would be that of a call whose operands are in the cache. Other processes count little, since times are
    this thread's own.
    """
    steps: list[list[tuple[Kernel, float]]] = []
    step()
    begin = time.thread_time()
    while len(steps) < _STEPS or time.thread_time() - begin < _SECONDS:
        with _Timer() as timer:
            step()
        steps.append(timer.calls)
    return [(same[0][0], median(seconds for _, seconds in same)) for same in zip(*steps, strict=True)]


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    """A curve of at most `_POINTS` points, each the mean of similar calls, without the launch that every call has."""
    groups: dict[int, list[tuple[float, float]]] = defaultdict(list)
    smallest = min(seconds - bound for bound, seconds in points)
    floor = min(max(smallest, 0.0), _LAUNCH)
    for bound, seconds in points:
        if bound > 0:
            groups[round(2 * math.log2(bound))].append((bound, max(seconds - floor, 0.1 * bound)))
    merged = [tuple(sum(column) / len(group) for column in zip(*group, strict=True)) for group in groups.values()]
    merged.sort()
    step = max(1, math.ceil(len(merged) / _POINTS))
    kept = [*merged[::step], *([merged[-1]] if merged and (len(merged) - 1) % step else [])]
    return tuple((bound, seconds) for bound, seconds in kept)  # type: ignore[misc]


def _networks() -> Iterable[Callable[[], object]]:
    """Steps of small networks, each with a few sizes: forward, backward, and the update."""

    def tokens(samples: int, length: int) -> Callable[[], object]:
        numbers = torch.zeros(samples, length, dtype=torch.long)
        return _step(_Tokens(), numbers, numbers)

    def images(samples: int, pixels: int) -> Callable[[], object]:
        return _step(_Images(), torch.ones(samples, 3, pixels, pixels), torch.zeros(samples, dtype=torch.long))

    def sequences(samples: int, length: int) -> Callable[[], object]:
        classes = torch.zeros(samples, length, dtype=torch.long)
        return _step(_Sequences(), torch.ones(samples, length, _WIDTH), classes)

    yield from itertools.starmap(tokens, ((1, 16), (1, 96), (4, 96), (12, 96)))
    yield from itertools.starmap(images, ((1, 32), (2, 64), (10, 64), (40, 64)))

    def routed(tokens: int) -> Callable[[], object]:
        return _step(_Experts(tokens), torch.ones(tokens, _WIDTH), torch.zeros(tokens, dtype=torch.long))

    yield from itertools.starmap(sequences, ((1, 24), (4, 24), (12, 24)))
    if _has_grouped_products():
        yield from map(routed, (32, 128, 512, 2048))


def _step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)

    def step() -> None:
        output = model(inputs)
        F.cross_entropy(output.flatten(0, -2), targets.flatten()).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.grad)  # as gradients of micro-batches are added
            parameter.grad.mul_(0.5).clone().copy_(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Tokens(nn.Module):
    """A block with torch's attention, then one with attention and norms that are written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_CLASSES, _WIDTH)
        self.norm, self.qkv, self.output = (
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 3 * _WIDTH),
            nn.Linear(_WIDTH, _WIDTH),
        )
        self.up, self.gate = (nn.Linear(_WIDTH, 4 * _WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.head = nn.Linear(_WIDTH, _CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.output(self._attend(self.norm(x), written_out=False))
        x = x + self.down(F.gelu(self.up(x)))
        x = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        x = x + self.output(self._attend(x, written_out=True))
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        x = x + self.down(F.relu(self.up(x)))
        return self.head(self.norm(x))

    def _attend(self, x: torch.Tensor, written_out: bool) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if not written_out:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
            mixed = (q @ k.mT * 0.1).masked_fill(~mask, -1e9).softmax(-1) @ v
        return mixed.transpose(1, 2).flatten(2)


class _Images(nn.Module):
    """Convolutions of many pixels and few channels, then of few pixels and many channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        width = 3
        for wider in (32, 64, 128, 256):
            self.layers += [
                nn.Conv2d(width, wider, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(wider),
                nn.ReLU(),
                nn.Conv2d(wider, wider, 3, padding=1),
                nn.GroupNorm(8, wider),
                nn.SiLU(),
            ]
            width = wider
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images
        for layer in self.layers:
            x = layer(x)
        return self.head(F.interpolate(F.max_pool2d(x, 2), scale_factor=2).mean((2, 3)))


class _Experts(nn.Module):
    """Four experts, each of which gets as many tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        experts = 4
        self.up = nn.Parameter(torch.full((experts, _WIDTH, 4 * _WIDTH), 0.01))
        self.down = nn.Parameter(torch.full((experts, 2 * _WIDTH, _WIDTH), 0.01))
        self.head = nn.Linear(_WIDTH, _CLASSES)
        self.ends = (torch.arange(1, experts + 1) * tokens // experts).int()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = F.grouped_mm(x, self.up, offs=self.ends).chunk(2, -1)
        return self.head(F.grouped_mm(F.silu(gate) * up, self.down, offs=self.ends))


def _has_grouped_products() -> bool:
    """Whether this torch multiplies groups of rows on a CPU in fp32."""
    try:
        routed = _Experts(8)
        routed(torch.ones(8, _WIDTH)).square().sum().backward()
    except (AttributeError, RuntimeError):
        return False
    return True


class _Sequences(nn.Module):
    """A recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(_WIDTH, _WIDTH, batch_first=True), nn.Linear(_WIDTH, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0].tanh().sigmoid())
