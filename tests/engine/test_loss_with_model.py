"""Loss functions that are given the model: what one process computes, under any plan."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seeds
import tensorshard as ts
from log_lines import logged
from parity import assert_same_state

STEPS = 20
SAMPLES, WIDTH, CLASSES = 12, 8, 6
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)

# Ranks, and fields of the plan.
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero0-micro2": (2, dict(zero=0, micro_batches=2)),
    "zero1": (2, dict(zero=1)),
    "zero2-recompute": (2, dict(zero=2, recompute="full")),
    "zero3": (2, dict(zero=3)),
    "zero3-micro2": (2, dict(zero=3, micro_batches=2)),
    "zero3-recompute": (2, dict(zero=3, recompute="full")),
    "hybrid": (4, dict(dp_replicate=2, dp_shard=2, zero=3)),
    "offload": (2, dict(zero=2, offload="cpu")),
    "tp": (2, dict(tp=2)),
    "tp-zero1": (4, dict(tp=2, dp_shard=2, zero=1)),
    "tp-zero3": (4, dict(tp=2, dp_shard=2, zero=3)),
    "cp": (2, dict(cp=2)),
}


class Net(nn.Module):
    """Blocks over [samples, positions, features], a head, a second head that few losses use, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        seeds.seed(3)
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.energy = nn.Linear(WIDTH, 1)
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def potential(self, x: torch.Tensor) -> torch.Tensor:
        return self.energy(torch.tanh(self.encode(x))).sum((1, 2))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.head(self.encode(x * scale))


def _log_probability(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).log_softmax(-1).gather(-1, y[..., None]).squeeze(-1).sum(1)


def preference(model: Any, batch: Any) -> Any:
    """Two calls of the model, and a metric."""
    margin = _log_probability(model, batch["x"], batch["y"]) - _log_probability(model, batch["other"], batch["y"])
    return -F.logsigmoid(0.5 * margin).mean(), {"margin": margin, "right": (margin > 0).double().mean()}


def gradient_penalty(model: Any, batch: Any) -> Any:
    """Differentiated twice, by the inputs and then by the weights."""
    x = batch["x"].clone().requires_grad_()
    with torch.enable_grad():
        output = model(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    loss = F.cross_entropy(output.transpose(1, 2), batch["y"], reduction="sum"), batch["y"].numel()
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return {"loss": loss, "penalty": ts.LossTerm(penalty, 0.1)}


def forces(model: Any, batch: Any) -> Any:
    """A method of the model, its derivative by the inputs, and sums over numbers of their own."""
    x = batch["x"].clone().requires_grad_()
    with torch.enable_grad():
        energies = model.potential(x)
        (slope,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
    wanted = batch["mask"][:, :, None].float()
    return {
        "energy": F.mse_loss(energies, batch["x"].sum((1, 2))),
        "force": ts.LossTerm((((slope - batch["other"]).square() * wanted).sum(), batch["mask"].sum()), 0.25),
    }


def regularized(model: Any, batch: Any) -> Any:
    """Calls of parts of the model, one of them frozen and without a graph, and a term of the weights."""
    with torch.no_grad():
        wanted = model.teacher(batch["x"])
    found = model.encode(batch["x"])
    size = sum(p.square().sum() for name, p in model.named_parameters() if "blocks" in name)
    return {
        "distance": F.mse_loss(found.float(), wanted.float()),
        "head": F.cross_entropy(model.head(found).float().transpose(1, 2), batch["y"]),
        "size": ts.LossTerm(size, 1e-2),
    }


def adversarial(model: Any, batch: Any) -> Any:
    """A step against the gradient by the inputs, and tokens that count unevenly."""
    y = torch.where(batch["mask"], batch["y"], -100)
    x = batch["x"].clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x).transpose(1, 2), batch["y"], reduction="sum"), x)
    output = model(batch["x"] + 0.1 * slope.sign(), scale=0.9)
    return F.cross_entropy(output.transpose(1, 2), y, reduction="sum"), (y != -100).sum()


def laplacian(model: Any, batch: Any) -> Any:
    """Differentiated three times, as in networks that solve differential equations."""
    x = batch["x"].clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
        curves = [torch.autograd.grad(slope[..., i].sum(), x, create_graph=True)[0][..., i] for i in range(2)]
    return (sum(curves) - batch["other"][..., 0]).square().mean()


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    loss.__name__: loss for loss in (preference, gradient_penalty, forces, regularized, adversarial, laplacian)
}
NAMES = {
    "preference": {"margin", "right"},
    "gradient_penalty": {"loss", "penalty"},
    "forces": {"energy", "force"},
    "regularized": {"distance", "head", "size"},
    "adversarial": set(),
    "laplacian": set(),
}


def _batch(step: int) -> dict[str, torch.Tensor]:
    generator = seeds.generator(500 + step)
    x, other = torch.randn(2, SAMPLES, 4, WIDTH, generator=generator)
    mask = torch.rand(SAMPLES, 4, generator=generator) < torch.linspace(0.3, 1, SAMPLES)[:, None]
    y = torch.randint(CLASSES, (SAMPLES, 4), generator=generator)
    return {"x": x, "other": other, "y": y, "mask": mask}


def _share(batch: dict[str, torch.Tensor], engine: ts.Engine) -> dict[str, torch.Tensor]:
    """This data rank's samples: the first rank has more than the others, where no micro-batches forbid it."""
    rank, size = engine.mesh.dp_rank, engine.mesh.dp_size
    uneven = engine.plan.micro_batches == 1 and size > 1
    bounds = [0, SAMPLES // size + uneven, *(SAMPLES * (i + 1) // size for i in range(1, size))]
    bounds = bounds if uneven else [SAMPLES * i // size for i in range(size + 1)]
    return {name: tensor[bounds[rank] : bounds[rank + 1]] for name, tensor in batch.items()}


def _train(loss: str, fields: dict[str, Any]) -> dict[str, Any]:
    engine = ts.parallelize(
        Net(), ts.Plan(**fields), optimizer=ADAMW, loss_fn=LOSSES[loss], sample_inputs=torch.zeros(2, 4, WIDTH)
    )
    losses = [engine.evaluate(_share(_batch(99), engine)).item()]
    metrics = [engine.metrics]
    for step in range(STEPS):
        losses.append(engine.step(_share(_batch(step), engine)).item())
        metrics.append(engine.metrics)
    return {
        "losses": losses,
        "metrics": [{k: v.item() for k, v in found.items()} for found in metrics],
        "state": engine.full_state_dict(),
    }


def _value(term: Any) -> Any:
    return term[0] / term[1] if isinstance(term, tuple) else term


def _alone(loss: str, precision: str = "fp32") -> dict[str, Any]:
    """The same in plain PyTorch."""
    model: Any = Net()
    if precision == "bf16":
        model = _Autocast(model)
    optimizer = ADAMW([p for p in model.parameters() if p.requires_grad])
    losses, metrics = [], []
    for step in [99, *range(STEPS)]:
        returned = LOSSES[loss](model, _batch(step))
        found = {}
        if isinstance(returned, tuple) and isinstance(returned[1], dict):
            returned, shown = returned
            found = {name: value.double().mean().item() for name, value in shown.items()}
        if isinstance(returned, dict):
            terms = {k: v if isinstance(v, ts.LossTerm) else ts.LossTerm(v) for k, v in returned.items()}
            total = sum(term.weight * _value(term.value) for term in terms.values())
            found = {name: _value(term.value).item() for name, term in terms.items()}
        else:
            total = _value(returned)
        losses.append(total.item())
        metrics.append(found)
        if step != 99:
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
    return {"losses": losses, "metrics": metrics, "state": model.state_dict()}


class _Autocast:
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        return self._within(value) if name in ("encode", "potential", "head", "teacher") else value

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._within(self._model)(*args, **kwargs).float()

    def _within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return function(*args, **kwargs)

        return call


@pytest.fixture(scope="module")
def alone(ranks):
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def find(loss: str, precision: str = "fp32") -> dict[str, Any]:
        key = loss, precision
        if key not in known:
            known[key] = ranks(1, _alone, loss, precision)[0]
        return known[key]

    return find


# What is refused there.
SENTENCES = {
    ("gradient_penalty", "cp"): "context parallelism has no second derivatives",
    ("laplacian", "cp"): "context parallelism has no second derivatives",
}
CELLS = [(loss, plan) for loss in LOSSES for plan in PLANS]
FAST = {("preference", "zero1"), ("gradient_penalty", "zero3"), ("regularized", "tp"), ("forces", "zero0-micro2")}


@pytest.mark.parametrize(
    ("loss", "plan"), [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow) for cell in CELLS]
)
def test_a_loss_that_calls_the_model_gives_what_one_process_gives(ranks, alone, loss, plan):
    size, fields = PLANS[plan]
    if (loss, plan) in SENTENCES:
        with pytest.raises(AssertionError, match=SENTENCES[loss, plan]):
            ranks(size, _train, loss, fields)
        return
    found, expected = ranks(size, _train, loss, fields)[0], alone(loss)
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert set(mine) == NAMES[loss]
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert_same_state(found["state"], expected["state"], 1e-5)


@pytest.mark.slow_cases("regularized-zero3", "preference-zero3")
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
@pytest.mark.parametrize("loss", ["preference", "regularized"])
def test_in_bf16_as_one_process_in_bf16(ranks, alone, loss, plan):
    size, fields = PLANS[plan]
    found = ranks(size, _train, loss, {**fields, "precision": "bf16"})[0]
    expected, exact = alone(loss, "bf16"), alone(loss)
    losses = torch.tensor([found["losses"], expected["losses"], exact["losses"]]).double()
    rounding = (losses[1] - losses[2]).abs().max()  # what bf16 itself does to the losses of one process
    assert (losses[0] - losses[1]).abs().max() < 2 * rounding


def _epochs(loss: str, fields: dict[str, Any]) -> tuple[list[float], float, dict[str, float], dict[str, torch.Tensor]]:
    engine = ts.parallelize(Net(), ts.Plan(**fields), optimizer=ADAMW, loss_fn=LOSSES[loss])
    batch = _batch(7)
    samples = [{name: tensor[i] for name, tensor in batch.items()} for i in range(9)]  # batches of 8 and 1
    losses = [
        engine.step(part).item()
        for epoch in range(2)
        for part in engine.loader(samples, 8, name=str(epoch), seed=epoch)
    ]
    mean = engine.evaluate(engine.loader(samples, 4, shuffle=False, name="evaluation")).item()
    return losses, mean, {k: v.item() for k, v in engine.metrics.items()}, engine.full_state_dict()


@pytest.mark.slow_cases("forces-zero3-micro2", "preference-zero1")
@pytest.mark.parametrize("plan", ["zero1", "zero3-micro2"])
@pytest.mark.parametrize("loss", ["preference", "forces"])
def test_a_rank_without_a_sample(ranks, loss, plan):
    expected = ranks(1, _epochs, loss, {})[0]
    losses, mean, metrics, state = ranks(2, _epochs, loss, PLANS[plan][1])[0]
    assert losses == pytest.approx(expected[0], rel=1e-5) and mean == pytest.approx(expected[1], rel=1e-5)
    assert metrics == pytest.approx(expected[2], rel=1e-5, abs=1e-6)
    assert_same_state(state, expected[3], 1e-5)


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seeds.seed(4)
        self.layer = nn.Linear(3, 1)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(nodes), 1).index_add(0, edges[:, 1], self.layer(nodes)[edges[:, 0]])


def _of_graphs(model: Any, batch: Any) -> Any:
    (nodes, edges), wanted = batch
    found = model(nodes, edges).squeeze(1)
    return ((found - wanted["value"]).square().sum(), len(nodes)), {"nodes": len(nodes), "edges": (len(edges), 1)}


def _graphs(micro_batches: int = 1) -> tuple[list[float], dict[str, float]]:
    plan = ts.Plan(zero=3, micro_batches=micro_batches)
    engine = ts.parallelize(Graphs(), plan, optimizer=ADAMW, loss_fn=_of_graphs)
    losses = []
    for step in range(4):
        generator = seeds.generator(step)
        nodes = torch.randn(9, 3, generator=generator)
        cut = [(nodes, 0)] if engine.mesh.dp_size == 1 else [(nodes[:4], 0), (nodes[4:], 4)]
        mine, first = cut[engine.mesh.dp_rank]
        edges = torch.tensor([[0, 1], [1, 2], [2, 0], [5, 4], [6, 5], [7, 4], [8, 7]])
        edges = edges[(edges >= first).all(1) & (edges < first + len(mine)).all(1)] - first
        losses.append(engine.step((mine, edges), {"value": mine.sum(1)}).item())
    return losses, {name: value.item() for name, value in engine.metrics.items()}


def test_a_batch_is_any_nest_of_tensors(ranks):
    losses, metrics = ranks(2, _graphs)[0]
    assert losses == pytest.approx(ranks(1, _graphs)[0][0], rel=1e-5)
    assert metrics == {"nodes": pytest.approx(4.5), "edges": pytest.approx(3.5)}  # means over the two ranks
    with pytest.raises(AssertionError, match=r"a batch whose tensors have the first dimensions 3, 4 was given"):
        ranks(2, _graphs, 2)


def _metric_of_one_rank(model: Any, batch: Any) -> Any:
    metrics = {"own": 2.0} if batch["rank"] == 1 else {}
    metrics |= {"late": 1.0} if batch["step"] == 1 else {}
    return model(batch["x"]).square().mean(), metrics


def _named(steps: int) -> dict[str, float]:
    engine = ts.parallelize(Net(), ts.Plan(), optimizer=ADAMW, loss_fn=_metric_of_one_rank)
    for step in range(steps):
        engine.step({"x": torch.randn(4, 4, WIDTH), "rank": engine.mesh.dp_rank, "step": step})
    return {name: value.item() for name, value in engine.metrics.items()}


def test_metrics_that_some_ranks_have(ranks):
    assert ranks(2, _named, 1) == [{"own": 2.0}] * 2
    with pytest.raises(AssertionError, match=r"'late', which the first call of engine.step did not have"):
        ranks(2, _named, 2)


def _plain(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return output.mean()


def test_what_is_refused(ranks):
    with pytest.raises(ValueError, match=r"loss_fn takes the model and pp=2 was given"):
        ts.parallelize(Net(), ts.Plan(pp=2), optimizer=ADAMW, loss_fn=preference)
    with pytest.raises(TypeError, match="let `model` be the first parameter"):
        ts.parallelize(Net(), ts.Plan(), optimizer=ADAMW, loss_fn=lambda batch, model: None)
    ranks(1, _refusals)


def _refusals() -> None:
    x = torch.randn(4, 4, WIDTH)
    plain = ts.parallelize(Net(), ts.Plan(), optimizer=ADAMW, loss_fn=_plain)
    with pytest.raises(TypeError, match=r"engine.step was given a batch without targets"):
        plain.step(x)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda model, batch: {}, TypeError, "a dict without a term"),
        (lambda model, batch: model(batch), TypeError, "loss_fn returned a tensor of shape"),
        (lambda model, batch: {"a": model(batch)}, TypeError, "for the term 'a' a tensor of shape"),
        (lambda model, batch: ({"a": model(batch).mean()}, {"a": 1.0}), ValueError, "give them two names"),
        (lambda model, batch: (model(batch).mean(), {"a": "b"}), TypeError, "for the metric 'a' 'b'"),
        (lambda model, batch: model(batch).mean().detach(), ValueError, "the loss has no gradient"),
    ]
    for loss_fn, error, sentence in wrong:
        engine = ts.parallelize(Net(), ts.Plan(), optimizer=ADAMW, loss_fn=loss_fn)
        before = engine.full_state_dict()
        with pytest.raises(error, match=sentence):
            engine.step(x)
        assert_same_state(engine.full_state_dict(), before, 1e-30)


def _slope_without_enable_grad(model: Any, batch: Any) -> Any:
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return (slope - batch["other"]).square().mean()


def _differentiates(fields: dict[str, Any]) -> list[float]:
    engine = ts.parallelize(Net(), ts.Plan(**fields), optimizer=ADAMW, loss_fn=_slope_without_enable_grad)
    losses = [engine.step(_share(_batch(step), engine)).item() for step in range(3)]
    with pytest.raises(RuntimeError, match=r"loss_fn differentiates, and engine.evaluate computes without gradients"):
        engine.evaluate(_share(_batch(3), engine))
    return [*losses, engine.step(_share(_batch(3), engine)).item()]


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.fast_cases("0")
def test_a_loss_that_differentiates_where_evaluations_do_not(ranks, zero):
    """Steps compare the loss with that of samples in another order, which is an evaluation."""
    found = ranks(2, _differentiates, dict(zero=zero))[0]
    torch.testing.assert_close(found, ranks(1, _differentiates, {})[0], rtol=1e-5, atol=1e-6)


def _sharpness(model: Any, batch: Any) -> Any:
    """A sharpness-aware loss, whose first gradient is that of the samples at hand."""
    weights = dict(model.named_parameters())
    trained = {name: weight for name, weight in weights.items() if "head" in name}
    slopes = torch.autograd.grad(model(batch["x"]).square().mean(), list(trained.values()))
    moved = {name: w + 0.1 * g for (name, w), g in zip(trained.items(), slopes, strict=True)}
    return torch.func.functional_call(model, moved, (batch["x"],)).square().mean()


def _warnings(loss_fn: Any, fields: dict[str, Any]) -> list[str]:
    engine = ts.parallelize(Net(), ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_fn)
    with logged() as said:
        for step in range(2):
            engine.step(_share(_batch(step), engine))
    return [line for line in said if "a gradient by the weights" in line]


@pytest.mark.fast_cases("micro")
@pytest.mark.parametrize(
    ("world", "fields"),
    [(1, dict(micro_batches=2)), (2, dict(zero=0)), (2, dict(zero=2)), (2, dict(zero=3, micro_batches=2))],
    ids=["micro", "zero0", "zero2", "zero3"],
)
def test_a_gradient_by_the_weights_is_said_to_depend_on_ranks(ranks, world, fields):
    assert len(ranks(world, _warnings, _sharpness, fields)[0]) == 1
    assert ranks(world, _warnings, forces, fields)[0] == []


def test_estimates_and_verify(ranks):
    ranks(1, _estimated)
    with pytest.raises(ValueError, match="loss_fn takes the model, which may have several"):
        ts.verify(Net, ts.Plan(), inputs=_batch(0), targets=None, optimizer=ADAMW, loss_fn=preference, world_size=1)


def _estimated() -> None:
    torch.distributed.destroy_process_group()
    found = ts.estimate(
        Net, ts.Plan(tp=2), world_size=2, inputs=_batch(0), targets=None, optimizer=ADAMW, loss_fn=gradient_penalty
    )
    assert 2**14 < found.largest.peak_allocated < 2**18
