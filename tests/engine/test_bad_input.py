"""What parallelize and the Engine refuse, with which words, and that nothing has happened by then."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import parity
import tensorshard as ts
from tensorshard.engine.engine import NonFiniteLossError
from tensorshard.engine.gradients import LossScaler
from toys import data, squares

SGD = partial(torch.optim.SGD, lr=0.1)


class Holding(nn.Module):
    """Holds one parameter beside a usual layer."""

    def __init__(self, value: torch.Tensor, requires_grad: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.special = nn.Parameter(value, requires_grad=requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _frozen() -> nn.Module:
    return nn.Linear(6, 3).requires_grad_(False)


def _sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 4, sparse=True))


# what is wrong: (arguments of parallelize, the error, what it says)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no plan": (dict(plan={"zero": 3}), TypeError, r"plan is a dict; it must be a tensorshard\.Plan"),
    "no model": (dict(model=[1]), TypeError, "model is a list; it must be an nn.Module or a callable"),
    "degrees": (dict(plan=ts.Plan(dp_shard=3)), ValueError, r"multiply to 3, but the number of processes is 1"),
    "free axis": (
        dict(plan=ts.Plan(dp_replicate=2)),
        ValueError,
        r"dp_replicate=2 needs a multiple of 2 processes, and there is 1: start",
    ),
    "pipeline": (dict(plan=ts.Plan(pp=2)), ValueError, "pp=2 needs a multiple of 2 processes, and there is 1"),
    "context": (dict(plan=ts.Plan(cp=2)), ValueError, "cp=2 needs a multiple of 2 processes, and there is 1"),
    "offload": (
        dict(plan=ts.Plan(zero=1, offload=ts.Offload(optimizer="cpu", parameters="cpu"))),
        ValueError,
        "offload.parameters='cpu' was given with zero=1",
    ),
    "optimizer, no callable": (dict(optimizer="adamw"), TypeError, "optimizer is a str; it must be a callable"),
    "optimizer, already built": (
        dict(optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)),
        TypeError,
        "optimizer is a SGD; it must be a callable from parameters to an optimizer, such as functools.partial",
    ),
    "loss, no callable": (dict(loss_fn=0.5), TypeError, "loss_fn is a float; it must be a callable"),
    "no gradient": (
        dict(model=Holding(torch.arange(4), requires_grad=False)),
        ValueError,
        "parameter 'special' is of type int64, which has no gradient.*register it as a buffer",
    ),
    "complex": (
        dict(model=Holding(torch.zeros(2, dtype=torch.complex64))),
        ValueError,
        "parameter 'special' is of type complex64.*view_as_real",
    ),
    "nothing to train": (dict(model=_frozen()), ValueError, "no parameter of the model requires a gradient"),
    "sparse gradients": (dict(model=_sparse()), ValueError, "module '0' is an Embedding with sparse=True"),
    "unknown unit": (
        dict(plan=ts.Plan(shard_units=["layers.*"])),
        ValueError,
        r"no module of the model is called 'layers\.\*'",
    ),
}


def _arguments(**changed: Any) -> dict[str, Any]:
    usual = dict(model=nn.Sequential(nn.Linear(6, 3)), plan=ts.Plan(), optimizer=SGD, loss_fn=squares)
    return {**usual, **changed}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_is_allocated(what):
    changed, error, message = REFUSED[what]
    arguments = _arguments(**changed)
    with pytest.raises(error, match=message):
        ts.parallelize(**arguments)
    assert not dist.is_initialized()
    if isinstance(arguments["model"], nn.Module):  # not moved to the meta device either
        assert not any(p.is_meta for p in arguments["model"].parameters())


def test_the_world_of_torchrun_is_known_before_it_is_joined(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match=r"dp_replicate=4 needs a multiple of 4 processes, and there are 6"):
        ts.parallelize(**_arguments(plan=ts.Plan(dp_replicate=4)))
    assert not dist.is_initialized()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_precision_that_the_device_cannot_compute_in(monkeypatch, precision):
    def missing(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError('"LayerNormKernelImpl" not implemented')

    monkeypatch.setattr(nn.functional, "layer_norm", missing)
    with pytest.raises(
        ValueError, match=rf"precision='{precision}' does not work on cpu .*not implemented.*use 'fp32'"
    ):
        ts.parallelize(**_arguments(plan=ts.Plan(precision=precision)))
    assert not dist.is_initialized()


def _attempt(build: Callable[[], dict[str, Any]]) -> str:
    """The message of what parallelize raises, and of which type."""
    try:
        ts.parallelize(**_arguments(**build()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _laid_out_already() -> dict[str, Any]:
    return dict(model=ts.parallelize(**_arguments()).model)


def _split_already() -> dict[str, Any]:
    ts.init_process_group(2)
    return dict(model=lambda: nn.Sequential(nn.Linear(6, 8), ts.nn.ParallelLinear(8, 3, dim=0)), plan=ts.Plan(tp=2))


def _no_module() -> dict[str, Any]:
    return dict(model=lambda: "a model")


def _returns_nothing() -> dict[str, Any]:
    return dict(optimizer=lambda parameters: None)


def _holds_others() -> dict[str, Any]:
    return dict(optimizer=lambda parameters: torch.optim.SGD([nn.Parameter(torch.zeros(7))], lr=0.1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_laid_out_already, "ValueError: the model is laid out already, by tensorshard.parallelize"),
        (_split_already, "ValueError: module '1' is a ParallelLinear that is split over 2 ranks already, but a plan"),
        (_no_module, "TypeError: the callable returned a str, where an nn.Module was expected"),
        (_returns_nothing, "TypeError: optimizer(parameters) returned a NoneType; it must return a torch Optimizer"),
        (_holds_others, "ValueError: the optimizer holds a parameter of shape (7,) that it was not given"),
    ],
)
def test_refused_on_every_rank(ranks, build, message):
    for found in ranks(2, _attempt, build):
        assert found.startswith(message)


# -- in a step --


def _vector(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean(1)


def _vector_and_count(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return _vector(output, targets), len(targets)


def _three(output: torch.Tensor, targets: torch.Tensor) -> tuple[Any, ...]:
    return squares(output, targets), 1, 2


def _number(output: torch.Tensor, targets: torch.Tensor) -> float:
    return 1.5


def _step_message(loss_fn: Any, fields: dict[str, Any], inputs: Any, targets: Any) -> tuple[str, bool]:
    engine = ts.parallelize(**_arguments(loss_fn=loss_fn, plan=ts.Plan(**fields)))
    before = [p.detach().clone() for p in engine.sharded.masters().values()]
    try:
        engine.step(inputs, targets)
        message = ""
    except (TypeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    same = all(torch.equal(a, b) for a, b in zip(before, engine.sharded.masters().values(), strict=True))
    return message, same and engine.step_count == 0


X, T = data(0, 6)


@pytest.mark.parametrize(
    ("loss_fn", "fields", "inputs", "targets", "message"),
    [
        (_vector, {}, X, T, "TypeError: loss_fn returned a tensor of shape (6,); it must return a scalar tensor"),
        (_vector_and_count, {}, X, T, "TypeError: loss_fn returned a tuple of a tensor of shape (6,) and 6; it must"),
        (_three, {}, X, T, "TypeError: loss_fn returned a tuple of a tensor of shape () and 1 and 2; it must"),
        (_number, {}, X, T, "TypeError: loss_fn returned 1.5; it must return a scalar tensor"),
        (
            squares,
            dict(micro_batches=4),
            X,
            T,
            "ValueError: a batch of 6 samples on this rank does not split into micro_batches=4 equal parts; with 6 "
            "samples micro_batches can be 1, 2, 3, 6",
        ),
        (squares, dict(micro_batches=2), X, T[:4], "ValueError: a target tensor of shape (4, 3) cannot be cut"),
        (squares, {}, (X, X[:2]), T, "ValueError: inputs have first dimensions [2, 6]; every tensor must have"),
        (squares, {}, {}, T, "ValueError: inputs have no tensors"),
        (squares, {}, "text", T, "TypeError: inputs are a str; they must be a tensor, or a tuple or dict of tensors"),
    ],
)
def test_a_step_that_cannot_be_taken(ranks, loss_fn, fields, inputs, targets, message):
    found, untouched = ranks(1, _step_message, loss_fn, fields, inputs, targets)[0]
    assert found.startswith(message)
    assert untouched


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _snapshot(engine: ts.Engine) -> list[torch.Tensor]:
    states = [s for state in engine.optimizer.state.values() for s in state.values()]
    tensors = [*engine.sharded.masters().values(), *engine.model.buffers(), *states]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def _nan_on_one_rank(fields: dict[str, Any]) -> tuple[str, bool, list[float]]:
    """A good step, one whose batch holds a NaN on the last rank, a good one again; and the good ones alone."""
    kept, undisturbed = (
        ts.parallelize(Normalized(), ts.Plan(**fields), optimizer=partial(torch.optim.AdamW, lr=0.1), loss_fn=squares)
        for _ in range(2)
    )
    (x, t), (y, u) = (tuple(v.chunk(kept.mesh.dp_size)[kept.mesh.dp_rank] for v in data(s)) for s in range(2))
    kept.step(x, t)
    before = _snapshot(kept)
    bad = y.clone()
    if kept.mesh.dp_rank == kept.mesh.dp_size - 1:
        bad[0, 0] = float("nan")
    try:
        kept.step(bad, u)
        message = ""
    except NonFiniteLossError as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(before, _snapshot(kept), strict=True)) and kept.step_count == 1
    undisturbed.step(x, t)
    return message, same, [kept.step(y, u).item(), undisturbed.step(y, u).item()]


@pytest.mark.parametrize(
    "fields", [dict(zero=0), dict(zero=1, micro_batches=2), dict(zero=2), dict(zero=3), dict(zero=1, precision="fp16")]
)
def test_a_nan_loss_stops_every_rank_and_leaves_the_last_good_state(ranks, fields):
    for message, same, (after, undisturbed) in ranks(2, _nan_on_one_rank, fields):
        assert message.startswith("the loss of step 2 is nan; the step was not taken")
        assert "On rank 1: the inputs hold nan or infinity in 1 of " in message
        assert "learning rate" not in message
        assert same
        assert after == undisturbed


def _no_label(fields: dict[str, Any], own: bool) -> tuple[str, float]:
    """What a step says of whose last samples no label counts; and the loss where the batch without one counts 0."""
    torch.manual_seed(0)
    engine = ts.parallelize(nn.Linear(4, 3), ts.Plan(**fields), optimizer=SGD, loss_fn=nn.functional.cross_entropy)
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, -100, -100, -100, -100])
    x, y = (tensor.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for tensor in (x, y))
    with pytest.raises(NonFiniteLossError) as raised:
        if own:
            engine.backward(nn.functional.cross_entropy(engine.model(x), y))
            engine.optimizer.step()
        else:
            engine.step(x, y)
    engine.optimizer.zero_grad()
    total = nn.functional.cross_entropy(engine.model(x), y, reduction="sum")
    return str(raised.value), engine.backward((total, (y != -100).sum())).item()


@pytest.mark.parametrize(
    ("world_size", "fields", "own"),
    [(2, dict(zero=0), False), (2, dict(zero=3), True), (1, dict(micro_batches=2), False)],
    ids=["ranks", "own", "micro_batches"],
)
def test_a_mean_over_no_label_is_named(ranks, world_size, fields, own):
    for message, loss in ranks(world_size, _no_label, fields, own):
        assert "A mean over nothing is nan" in message and "(sum, count)" in message
        assert "learning rate" not in message
        where = {True: "The loss of rank 1 is not finite, and that of rank 0 is", False: "no target counts"}[own]
        assert where in message
        assert ("in one of 2 micro-batches: all are -100" in message) is (world_size == 1)
        assert 0 < loss < 5


class Cusp(nn.Module):
    """A finite loss whose gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3] + self.weight.abs().sqrt()


def _infinite_gradient(fields: dict[str, Any], scale: float | None = None) -> str:
    engine = ts.parallelize(Cusp(), ts.Plan(**fields), optimizer=SGD, loss_fn=squares)
    if scale is not None:
        assert engine.scaler is not None
        engine.scaler.scale = scale
    try:
        engine.step(*data(0))
    except NonFiniteLossError as error:
        return str(error)
    return ""


def test_a_gradient_that_is_not_finite(ranks):
    message = "the norm of the gradient of step 1 is nan"
    assert ranks(1, _infinite_gradient, dict(clip_grad_norm=1.0))[0].startswith(message)
    # fp16 skips such steps, but not forever: without any scaling left it is no overflow of the scale's making.
    assert ranks(1, _infinite_gradient, dict(precision="fp16"), 4.0)[0] == ""
    assert ranks(1, _infinite_gradient, dict(precision="fp16"), 1.0)[0].startswith(message)


def test_the_loss_scaler():
    scaler = LossScaler(scale=4.0, growth_interval=2)
    for overflowed, scale in [(True, 2.0), (False, 2.0), (False, 4.0), (False, 4.0), (True, 2.0), (False, 2.0)]:
        scaler.update(overflowed)
        assert scaler.scale == scale
    other = LossScaler(growth_interval=2)
    other.load_state_dict(scaler.state_dict())
    assert other == scaler
    for _ in range(3):
        scaler.update(overflowed=True)
    assert scaler.scale == 1.0 and scaler.is_smallest


def _forward_fails() -> None:
    engine = parity.make_engine("gpt", {})
    engine.step(torch.zeros(2, 99, dtype=torch.long), torch.zeros(2, 99, dtype=torch.long))


def test_what_a_models_forward_raises_comes_through(ranks):
    with pytest.raises(AssertionError, match="ValueError"):
        ranks(1, _forward_fails)
