"""A parameter that tensor parallelism splits looks whole to the user's code: what a loop does to it is exact."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import seeds
import tensorshard as ts

SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(x)
        x = x + self.attention(y, y, y)[0]  # with weights: the fused kernel cannot be differentiated twice
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Columns, rows, heads whose weight is packed, and layers that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(16, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


def build() -> Net:
    seeds.seed(5)
    return Net()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, 16, generator=generator), torch.randint(4, (4, 6), generator=generator)


def shared(engine: ts.Engine, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size, rank = engine.mesh.dp_size, engine.mesh.dp_rank
    return x.chunk(size)[rank], y.chunk(size)[rank]


def distance(engine: ts.Engine, alone: nn.Module) -> float:
    full = engine.full_state_dict()
    return max(((full[n] - w).abs().max().item() for n, w in alone.state_dict().items()), default=0.0) if full else 0.0


def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


# -- what a loss function reads --


def orthogonality(model: nn.Module) -> torch.Tensor:
    return sum(0.01 * (w.t() @ w - torch.eye(w.size(1))).square().sum() for w in model.parameters() if w.ndim == 2)


def absolute(model: nn.Module) -> torch.Tensor:
    return (
        0.01
        * torch.cat([p.flatten() for p in model.parameters()]).abs().sum()
        / sum(p.numel() for p in model.parameters())
    )


def squares(model: nn.Module) -> torch.Tensor:
    return 0.1 * torch.stack([p.norm() for _, p in model.named_parameters()]).square().sum()


def spectral(model: nn.Module) -> torch.Tensor:
    return 0.1 * sum(torch.linalg.matrix_norm(p, 2) for p in model.parameters() if p.shape == (32, 16))


def vectors(model: nn.Module) -> torch.Tensor:
    return 0.1 * nn.utils.parameters_to_vector(model.parameters()).square().mean()


def rows(model: nn.Module) -> torch.Tensor:
    return 0.1 * sum(row.norm() for row in model.blocks[0].up.weight) + model.blocks[1].down.weight[3:5, 1].sum()


PENALTIES = [orthogonality, absolute, squares, spectral, vectors, rows]


def penalize(penalty: Callable[[nn.Module], torch.Tensor], fields: dict[str, Any], own_loop: bool) -> tuple:
    model = build()
    alone = copy.deepcopy(model)
    engine = ts.parallelize(
        model, ts.Plan(**fields), optimizer=SGD, loss_fn=lambda o, y: loss_of(o, y) + penalty(engine.model)
    )
    optimizer = SGD(alone.parameters())
    losses = []
    for step in range(3):
        x, y = batch(step)
        expected = loss_of(alone(x), y) + penalty(alone)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        x, y = shared(engine, x, y)
        if own_loop:
            loss = loss_of(engine.model(x), y) + penalty(engine.model)
            engine.backward(loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        else:
            losses.append(engine.step(x, y).item() - expected.item())
    return distance(engine, alone), max(map(abs, losses), default=0.0)


@pytest.mark.slow_cases("True", "absolute", "squares", "vectors")
@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty(ranks, penalty, own_loop):
    assert max(ranks(2, penalize, penalty, dict(tp=2), own_loop)[0]) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        dict(tp=2, sequence_parallel=True),
        dict(tp=2, recompute="full", micro_batches=2),
        dict(tp=2, compile=True),
    ],
    ids=str,
)
def test_a_penalty_under_other_plans(ranks, fields):
    assert max(ranks(2, penalize, orthogonality, fields, False)[0]) < 2e-5


@pytest.mark.slow
def test_a_penalty_with_data_ranks(ranks):
    assert max(ranks(4, penalize, orthogonality, dict(tp=2, zero=0), False)[0]) < 2e-5


# -- what a loop writes --


@torch.no_grad()
def clamp(model: nn.Module, state: dict[str, Any]) -> None:
    for p in model.parameters():
        p.clamp_(-0.1, 0.1)


def clamp_data(model: nn.Module, state: dict[str, Any]) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def normalize(model: nn.Module, state: dict[str, Any]) -> None:
    for p in model.parameters():
        if p.ndim == 2:
            p.div_(p.norm(dim=1, keepdim=True))
            p.data *= 1.5


@torch.no_grad()
def assign_data(model: nn.Module, state: dict[str, Any]) -> None:
    for p in model.parameters():
        p.data = p.data * 0.9 + p.mean()


@torch.no_grad()
def from_vector(model: nn.Module, state: dict[str, Any]) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9 + vector.mean(), model.parameters())


def initialize(model: nn.Module, state: dict[str, Any]) -> None:
    nn.init.constant_(model.blocks[0].up.weight, 0.02)
    nn.init.eye_(model.blocks[1].down.weight)
    nn.init.zeros_(model.blocks[1].attention.in_proj_bias)


@torch.no_grad()
def some_entries(model: nn.Module, state: dict[str, Any]) -> None:
    weight = model.blocks[0].up.weight
    weight[3] = 0.5
    weight[20:24, 2] += 1
    weight.data[7:9].zero_()
    weight.view(-1)[::7].mul_(0.5)
    weight.detach().t()[1].fill_(0.25)
    model.blocks[1].attention.in_proj_weight[16:32].neg_()


@torch.no_grad()
def average(model: nn.Module, state: dict[str, Any]) -> None:
    """An average of the weights, which the weights are then pulled to (Lookahead)."""
    for name, p in model.named_parameters():
        slow = state.setdefault(name, p.detach().clone())
        slow.lerp_(p, 0.5)
        p.copy_(slow)


@torch.no_grad()
def between_blocks(model: nn.Module, state: dict[str, Any]) -> None:
    """A teacher: one block follows another."""
    for to, source in zip(model.blocks[1].parameters(), model.blocks[0].parameters(), strict=True):
        to.mul_(0.9).add_(source, alpha=0.1)
        to.lerp_(source.data, 0.1)


@torch.no_grad()
def foreach(model: nn.Module, state: dict[str, Any]) -> None:
    parameters = list(model.parameters())
    norms = torch._foreach_norm(parameters)
    torch._foreach_mul_(parameters, 0.9)
    torch._foreach_add_(parameters, [p.tanh() * n * 0.01 for p, n in zip(parameters, norms, strict=True)])


@torch.no_grad()
def kept_views(model: nn.Module, state: dict[str, Any]) -> None:
    views = state.setdefault("views", [p.data for p in model.parameters()])
    for view in views:
        view.mul_(0.95).add_(view.max(), alpha=0.01)


WRITES = [
    clamp, clamp_data, normalize, assign_data, from_vector, initialize, some_entries, average, between_blocks, foreach,
    kept_views,
]  # fmt: skip


def write(change: Callable[[nn.Module, dict[str, Any]], None], fields: dict[str, Any]) -> float:
    model = build()
    alone = copy.deepcopy(model)
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=SGD, loss_fn=loss_of)
    optimizer = SGD(alone.parameters())
    state: list[dict[str, Any]] = [{}, {}]
    for step in range(3):
        x, y = batch(step)
        engine.step(*shared(engine, x, y))
        change(engine.model, state[0])
        loss_of(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        change(alone, state[1])
    return distance(engine, alone)


@pytest.mark.fast_cases("some_entries")
@pytest.mark.parametrize("change", WRITES)
def test_a_write(ranks, change):
    assert ranks(2, write, change, dict(tp=2))[0] < 2e-5


# -- gradients --


def clip(engine: Any, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    _backward(engine, loss_of(model(x), y))
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def by_hand(engine: Any, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    output, parameters = model(x), list(model.parameters())
    first = torch.autograd.grad(loss_of(output, y), parameters, retain_graph=True)
    second = torch.autograd.grad(loss_of(output, (y + 1) % 4), parameters)
    for p, a, b in zip(parameters, first, second, strict=True):
        overlap = (a * b).sum()
        p.grad = a + b - overlap.clamp(max=0) * b / b.square().sum().clamp(min=1e-12)
    optimizer.step()


def perturb(engine: Any, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Sharpness-aware minimization."""
    _backward(engine, loss_of(model(x), y))
    parameters = list(model.parameters())
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    steps = []
    with torch.no_grad():
        for p in parameters:
            steps.append(0.05 * p.grad / norm)
            p.add_(steps[-1])
    optimizer.zero_grad()
    _backward(engine, loss_of(model(x), y))
    with torch.no_grad():
        for p, step in zip(parameters, steps, strict=True):
            p.sub_(step)
    optimizer.step()


def change_in_place(engine: Any, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    _backward(engine, loss_of(model(x), y))
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.1)  # a weight decay
        p.grad.sub_(p.grad.mean(tuple(range(1, p.ndim)), keepdim=True) if p.ndim > 1 else 0)  # centralization
    optimizer.step()


def penalize_gradient(engine: Any, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = loss_of(model(x), y)
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    _backward(engine, loss + sum(slope.norm() for slope in slopes))
    optimizer.step()


def _backward(engine: Any, loss: torch.Tensor) -> None:
    loss.backward() if engine is None else engine.backward(loss)


def differentiate(loop: Callable[..., None], fields: dict[str, Any]) -> float:
    model = build()
    alone = copy.deepcopy(model)
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=SGD, loss_fn=loss_of)
    optimizer = SGD(alone.parameters())
    for step in range(3):
        x, y = batch(step)
        loop(None, alone, optimizer, x, y)
        optimizer.zero_grad()
        loop(engine, engine.model, engine.optimizer, x, y)
        engine.optimizer.zero_grad()
    return distance(engine, alone)


@pytest.mark.parametrize(
    "loop",
    [
        clip,
        by_hand,
        pytest.param(perturb, marks=pytest.mark.slow),
        pytest.param(change_in_place, marks=pytest.mark.slow),
        penalize_gradient,
    ],
)
@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients(ranks, loop, sequence_parallel):
    assert ranks(2, differentiate, loop, dict(tp=2, sequence_parallel=sequence_parallel))[0] < 2e-5


def adapt(engine: Any, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Model-agnostic meta-learning: the loss after a step that is part of the graph."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    slopes = torch.autograd.grad(loss_of(model(x), y), parameters, create_graph=True)
    adapted = {name: p - 0.1 * slope for name, p, slope in zip(names, parameters, slopes, strict=True)}
    _backward(engine, loss_of(torch.func.functional_call(model, adapted, (x,)), (y + 1) % 4))
    optimizer.step()


def other_methods(engine: Any, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    features = model.blocks[1](model.blocks[0](x))
    direct = F.linear(features, model.head.weight, model.head.bias)
    _backward(engine, loss_of(direct, y) + model.encode(x).square().mean() + loss_of(model(x), y))
    optimizer.step()


@pytest.mark.parametrize("fields", [{}, pytest.param(dict(sequence_parallel=True), marks=pytest.mark.slow)], ids=str)
def test_a_loss_after_a_step(ranks, fields):
    assert ranks(2, differentiate, adapt, dict(tp=2, **fields))[0] < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param(dict(recompute="full"), marks=pytest.mark.slow),
        pytest.param(dict(compile=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_calls_of_methods_and_parts(ranks, fields):
    assert ranks(2, differentiate, other_methods, dict(tp=2, **fields))[0] < 2e-5


def hooked(engine: Any, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """A hook's term in the loss, and another hook that changes weights."""
    terms = []
    up = model.blocks[0].up
    handles = [
        up.register_forward_hook(lambda module, args, output: terms.append(module.weight.norm())),
        model.blocks[1].register_forward_pre_hook(lambda module, args: _clamp(module.down.weight)),
    ]
    output = model(x)
    _backward(engine, loss_of(output, y) + terms[0])
    for handle in handles:
        handle.remove()
    optimizer.step()


@torch.no_grad()
def _clamp(weight: torch.Tensor) -> None:
    weight[2:20].clamp_(-0.1, 0.1)


@pytest.mark.parametrize("fields", [{}, pytest.param(dict(recompute="full"), marks=pytest.mark.slow)], ids=str)
def test_hooks_of_modules(ranks, fields):
    assert ranks(2, differentiate, hooked, dict(tp=2, **fields))[0] < 2e-5


def transform() -> str:
    engine = ts.parallelize(build(), ts.Plan(tp=2), optimizer=SGD, loss_fn=loss_of)
    x, y = batch(0)
    weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(torch.func.functional_call(engine.model, given, (x,)), y)

    message = refusal(torch.func.grad(loss), weights)
    engine.step(x, y)  # goes on
    return message


def test_transforms_of_torch_func_are_refused(ranks):
    assert all("torch.autograd.grad" in message for message in ranks(2, transform))


# -- with ZeRO 3, too --


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        clamp,
        pytest.param(normalize, marks=pytest.mark.slow),
        some_entries,
        pytest.param(average, marks=pytest.mark.slow),
        pytest.param(kept_views, marks=pytest.mark.slow),
    ],
)
def test_a_write_with_shards(ranks, change):
    assert ranks(4, write, change, dict(tp=2, zero=3))[0] < 2e-5


@pytest.mark.slow_cases("perturb")
@pytest.mark.parametrize("loop", [pytest.param(clip, marks=pytest.mark.slow), perturb])
def test_gradients_with_shards(ranks, loop):
    assert ranks(4, differentiate, loop, dict(tp=2, zero=3))[0] < 2e-5


def head_alone(model: nn.Module) -> torch.Tensor:
    return model.head.weight.square().sum()


def refusal(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("own_loop", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("penalty", [squares, head_alone])
def test_a_penalty_with_shards(ranks, penalty, own_loop):
    assert max(ranks(4, penalize, penalty, dict(tp=2, zero=3), own_loop)[0]) < 2e-5


@pytest.mark.slow
def test_gradients_by_hand_of_shards(ranks):
    assert ranks(4, differentiate, by_hand, dict(tp=2, zero=3))[0] < 2e-5


# -- what it looks like --


def look() -> list[Any]:
    model = build()
    alone = copy.deepcopy(model)
    engine = ts.parallelize(model, ts.Plan(tp=2), optimizer=SGD, loss_fn=loss_of)
    p, q = engine.model.blocks[0].up.weight, alone.blocks[0].up.weight
    before = engine.model.blocks[0](torch.ones(2, 3, 16))
    facts = [
        isinstance(p, nn.Parameter),
        p.shape == q.shape and p.size(0) == 32 and len(p) == 32 and p.numel() == q.numel() and p.ndim == 2,
        p.grad is None and p.requires_grad and p.is_leaf and p.dtype == q.dtype,
        torch.equal(p, q)
        and torch.equal(p.cpu(), q)
        and p.tolist() == q.tolist()
        and (p.numpy(force=True) == q.numpy(force=True)).all(),
        torch.equal(torch.zeros_like(p), torch.zeros_like(q)) and p.new_zeros(3).shape == (3,),
        "32, 16" in repr(p) and p in {p} and p is engine.model.blocks[0].up.weight,
        sum(w.numel() for w in engine.model.parameters()) == sum(w.numel() for w in alone.parameters()),
        torch.equal(copy.deepcopy(p), q) and torch.equal(copy.deepcopy(p.data), q),
    ]
    kept = {name: w.detach().clone() for name, w in engine.model.named_parameters()}
    with torch.no_grad():
        for w in engine.model.parameters():
            w.mul_(0.5)
    with engine.using_weights(kept):
        facts.append(torch.allclose(engine.model.blocks[0](torch.ones(2, 3, 16)), before))
    engine.model.load_state_dict(alone.state_dict())
    facts.append(torch.allclose(engine.model.blocks[0](torch.ones(2, 3, 16)), before))
    try:
        p.add_(1)
        facts.append(False)
    except RuntimeError as error:
        facts.append("leaf Variable" in str(error))
    try:
        p[0] = 1
        facts.append(False)
    except RuntimeError as error:
        facts.append("leaf Variable" in str(error))
    facts.append(torch.equal(p, q))
    try:
        p.data = torch.zeros(3)
        facts.append(False)
    except RuntimeError as error:
        facts.append("split over tensor-parallel ranks" in str(error))
    try:
        copy.deepcopy(engine.model.blocks[0])
        facts.append(False)
    except RuntimeError as error:
        facts.append("before parallelize" in str(error))
    return facts


def test_what_a_split_parameter_looks_like(ranks):
    for facts in ranks(2, look):
        assert all(facts), facts
