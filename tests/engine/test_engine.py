"""The Engine beyond parity: models with oddities, raw loops, batches of any form, evaluation, fp16, what is held."""

import gc
import unittest.mock
import weakref
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

import parity
import tensorshard as ts
from tensorshard.materialize import Recording
from toys import Block, Odd, Regular, data, plain_loop, squares

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3)
LEVELS = [0, 1, 2, 3]


def engine_of(model: Any, optimizer: Any = ADAMW, loss_fn: Any = squares, seed: int = 0, **fields: Any) -> ts.Engine:
    return ts.parallelize(model, ts.Plan(**fields), optimizer=optimizer, loss_fn=loss_fn, seed=seed)


def own_shard(engine: ts.Engine, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for tensor in tensors]


def assert_same_state(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    counters = {name: value for name, value in found.items() if name == "calls"}  # a loop over parts counts more
    parity.assert_same_state(found, expected | counters, tolerance)


# -- oddities of models --


def _train_odd(model: type[nn.Module], fields: dict[str, Any], sometimes: int | None) -> tuple:
    engine = engine_of(model(), **fields)
    losses = [engine.step(*own_shard(engine, *data(step, sometimes=sometimes))).item() for step in range(4)]
    return losses, engine.full_state_dict()


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (1, dict(micro_batches=4)),
        (2, dict(zero=0, micro_batches=2)),
        (2, dict(zero=2, micro_batches=4, clip_grad_norm=0.5)),
        (2, dict(dp_replicate=2, dp_shard=1, zero=2, micro_batches=4)),
        (4, dict(zero=0)),
        (4, dict(zero=1, micro_batches=2)),
        (4, dict(zero=2)),
        (4, dict(zero=3, micro_batches=2, clip_grad_norm=0.5)),
        (4, dict(dp_replicate=2, zero=1, clip_grad_norm=0.5)),
        (4, dict(dp_replicate=2, zero=3, micro_batches=2)),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_frozen_unused_tied_uneven_and_scalar_parameters(ranks, world_size, fields):
    losses, state = ranks(world_size, _train_odd, Regular, fields, None)[0]
    model = Regular()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = [[data(step)] for step in range(4)]
    expected = list(plain_loop(model, ADAMW(model.parameters()), steps, clip=fields.get("clip_grad_norm")))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())
    for name in ("frozen.weight", "never.weight", "never_wide"):  # without a gradient there is no weight decay either
        assert torch.equal(state[name], before[name])
    assert "mask" not in state


@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=1), dict(zero=2), dict(zero=1, dp_replicate=2)])
def test_parameters_that_only_one_rank_uses(ranks, fields):
    losses, state = ranks(4, _train_odd, Odd, fields, 2)[0]
    model = Odd()
    steps = [list(zip(*(t.chunk(4) for t in data(step, sometimes=2)), strict=True)) for step in range(4)]
    expected = list(plain_loop(model, ADAMW(model.parameters()), steps))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())


@pytest.mark.parametrize("fields", [dict(zero=0), dict(zero=1), dict(zero=2)])
def test_parameters_that_only_one_micro_batch_uses(ranks, fields):
    losses, state = ranks(1, _train_odd, Odd, dict(micro_batches=4, **fields), 2)[0]
    model = Odd()
    steps = [list(zip(*(t.chunk(4) for t in data(step, sometimes=2)), strict=True)) for step in range(4)]
    expected = list(plain_loop(model, ADAMW(model.parameters()), steps))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())


def _bf16_initial(level: int) -> tuple:
    engine = engine_of(Regular(), zero=level, precision="bf16")
    initial = engine.full_state_dict()
    return (
        initial,
        {name: p.dtype for name, p in engine.model.named_parameters()},
        {name: getattr(p, "_local_tensor", p).dtype for name, p in engine.sharded.masters().items()},
    )


@pytest.mark.parametrize("level", LEVELS)
def test_masters_are_fp32_and_frozen_ones_keep_their_digits(ranks, level):
    initial, shown, masters = ranks(2, _bf16_initial, level)[0]
    assert_same_state(initial, Regular().state_dict(), 0.0)
    assert set(shown.values()) == set(masters.values()) == {torch.float32}


def _unsharded_reduction() -> dict[str, torch.dtype]:
    sums: dict[str, torch.dtype] = {}
    for name in ("fp32", "bf16"):
        engine = engine_of(Regular(), zero=1, reduce_dtype=name)
        with _Operations() as operations:
            engine.step(*own_shard(engine, *data(0)))
        sums[name] = torch.bfloat16 in operations.dtypes
    return sums


class _Operations(TorchDispatchMode):
    """Counts operations, and remembers of which types their results were."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.dtypes.add(result.dtype)
        return result


def test_reduce_dtype_is_not_ignored_in_fp32(ranks):
    assert ranks(2, _unsharded_reduction)[0] == {"fp32": False, "bf16": True}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.recurrent = nn.LSTM(6, 5, 2, batch_first=True)  # keeps its weights in a list as well
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x[:, None])[0][:, 0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_recurrent_network(ranks, level):
    losses, state = ranks(2, _train_odd, Recurrent, dict(zero=level), None)[0]
    model = Recurrent()
    expected = list(plain_loop(model, ADAMW(model.parameters()), [[data(step)] for step in range(4)]))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())


class Fp64(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.double())


@pytest.mark.parametrize("level", [0, 2, 3])
def test_fp64_stays_fp64(ranks, level):
    losses, state = ranks(2, _train_odd, Fp64, dict(zero=level), None)[0]
    model = Fp64()
    expected = list(plain_loop(model, ADAMW(model.parameters()), [[data(step)] for step in range(4)]))
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0.0)
    assert_same_state(state, model.state_dict(), 1e-10)


def _buffers() -> dict[str, torch.Tensor]:
    engine = parity.make_engine("resnet", dict(zero=1))
    for step in range(2):
        engine.step(*parity.shard(engine, *parity.batch("resnet", step)))
    return {name: buffer.clone() for name, buffer in engine.model.named_buffers()}


def test_running_statistics_are_the_same_on_every_rank(ranks):
    first, second = ranks(2, _buffers)
    assert any(name.endswith("running_var") for name in first)
    assert_same_state(first, second, 0.0)


class StepRunner(nn.Module):
    """Never calls the blocks themselves, but what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block[1](block[0](x))
        return x


def _step_twice(fields: dict[str, Any]) -> str:
    engine = engine_of(StepRunner(), **fields)
    try:
        for step in range(2):
            engine.step(*own_shard(engine, *data(step)))
    except RuntimeError as error:
        return str(error)
    return ""


def test_units_that_are_never_called_do_not_train_on_stale_weights(ranks):
    found = ranks(2, _step_twice, dict(zero=1))
    assert all("was used before its update had arrived" in message and "shard_units" in message for message in found)
    assert ranks(2, _step_twice, dict(zero=1, shard_units=["blocks.*.0"])) == ["", ""]


# -- loops of one's own --


def _raw_loop(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = engine_of(Regular(), **fields)
    for step in range(3):
        for inputs, targets in zip(*(t.chunk(2) for t in data(step)), strict=True):
            squares(engine.model(*own_shard(engine, inputs)), *own_shard(engine, targets)).backward()
        torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 0.7)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        with torch.no_grad():
            engine.model(data(0)[0])
    return engine.full_state_dict()


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (1, dict()),
        (2, dict(zero=0)),
        (2, dict(zero=1)),
        (2, dict(zero=2)),
        (2, dict(zero=3)),
        (4, dict(dp_replicate=2)),
    ],
)
def test_a_raw_loop_with_accumulation_and_clipping(ranks, world_size, fields):
    state = ranks(world_size, _raw_loop, fields)[0]
    model = Regular()
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        for inputs, targets in zip(*(t.chunk(2) for t in data(step)), strict=True):
            squares(model(inputs), targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        assert norm > 0.7
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(state, model.state_dict())


def _raw_and_step(fields: dict[str, Any]) -> tuple:
    raw, stepped = engine_of(Regular(), **fields), engine_of(Regular(), **fields)
    for step in range(3):
        inputs, targets = own_shard(raw, *data(step))
        squares(raw.model(inputs).float(), targets).backward()
        raw.optimizer.step()
        raw.optimizer.zero_grad()
        stepped.step(inputs, targets)
    return raw.full_state_dict(), stepped.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
def test_a_raw_loop_does_what_step_does(ranks, level):
    raw, stepped = ranks(2, _raw_and_step, dict(zero=level))[0]
    assert_same_state(raw, stepped)


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise MemoryError("in backward")


class FailingLoss:
    """Fails where it is told to, in its second call since."""

    where = ""
    calls = 0

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.where and self.calls == 2:
            if self.where == "in forward":
                raise MemoryError(self.where)
            return squares(_FailsInBackward.apply(output), targets)
        return squares(output, targets)


def _after_failures(fields: dict[str, Any], places: list[str]) -> list[tuple[float, float]]:
    """Losses of the steps of an engine that was interrupted before each, and of one that was not."""
    loss_fn = FailingLoss()
    interrupted = engine_of(Regular(), loss_fn=loss_fn, micro_batches=2, **fields)
    undisturbed = engine_of(Regular(), micro_batches=2, **fields)
    losses = []
    for step, where in enumerate(places):
        inputs, targets = own_shard(interrupted, *data(step))
        squares(interrupted.model(inputs), targets).backward()  # as a loop of one's own would leave behind
        loss_fn.where, loss_fn.calls = where, 0
        with pytest.raises(MemoryError, match=where):
            interrupted.step(*own_shard(interrupted, *data(7)))
        loss_fn.where = ""
        losses.append((interrupted.step(inputs, targets).item(), undisturbed.step(inputs, targets).item()))
    return losses


@pytest.mark.parametrize("level", LEVELS)
def test_a_failed_step_leaves_nothing_behind(ranks, level):
    losses = ranks(2, _after_failures, dict(zero=level), ["in forward"] * 2)[0]
    losses += ranks(1, _after_failures, dict(zero=level), ["in forward", "in backward", "in forward"])[0]
    assert all(interrupted == undisturbed for interrupted, undisturbed in losses)


# -- optimizers --


def _by_dimension(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def _by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for n, p in named_parameters if "norm" not in n]},
        {"params": [p for n, p in named_parameters if "norm" in n], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.3)


def _with_schedule(factory: Any, level: int) -> tuple:
    engine = engine_of(Regular(), factory, zero=level)
    scheduler = LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        engine.step(*own_shard(engine, *data(step)))
        scheduler.step()
    return engine.full_state_dict(), [group["lr"] for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("factory", [_by_dimension, _by_name])
def test_parameter_groups_and_schedules(ranks, level, factory):
    state, rates = ranks(2, _with_schedule, factory, level)[0]
    model = Regular()
    given = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = factory(given if factory is _by_name else [p for _, p in given])
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        list(plain_loop(model, optimizer, [[data(step)]]))
        scheduler.step()
    assert rates == [group["lr"] for group in optimizer.param_groups]
    assert_same_state(state, model.state_dict())


def _kernels() -> list[Any]:
    choices = [{}, {"foreach": False}, {"fused": False}, {"foreach": True}, {"fused": True}]
    engines = [engine_of(Regular(), partial(torch.optim.AdamW, **choice)) for choice in choices]
    for engine in engines:
        engine.step(*own_shard(engine, *data(0)))
    return [(group["fused"], group["foreach"]) for engine in engines for group in engine.optimizer.param_groups]


def test_a_fused_optimizer_is_chosen_only_where_the_choice_was_left_open(ranks):
    assert ranks(1, _kernels)[0] == [(True, None), (None, False), (False, None), (None, True), (True, None)]


def _attributes(level: int, precision: str) -> list[Any]:
    model = Regular()
    model.wide.weight.no_decay = "yes"
    seen: list[Any] = []

    def factory(named_parameters):
        seen.extend((name, tuple(p.shape), p.no_decay) for name, p in named_parameters if hasattr(p, "no_decay"))
        return ADAMW([p for _, p in named_parameters])

    engine_of(model, factory, zero=level, precision=precision)
    return seen


@pytest.mark.parametrize(("level", "precision"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_the_optimizer_sees_whole_shapes_and_what_was_hung_on_a_parameter(ranks, level, precision):
    assert ranks(2, _attributes, level, precision)[0] == [("wide.weight", (128, 128), "yes")]


# -- batches and losses --


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": self.layer(x + y), "difference": self.layer(x - y)}


def _two_losses(output: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    return squares(output["sum"], targets["a"]) + squares(output["difference"], targets["b"])


def _forms() -> list[float]:
    engine = engine_of(TwoInputs(), partial(torch.optim.SGD, lr=0.0), _two_losses, micro_batches=2)
    x, a = own_shard(engine, *data(0))
    y, b = own_shard(engine, *data(1))
    targets = {"a": a, "b": b}
    return [engine.step(inputs, targets).item() for inputs in ((x, y), [x, y], {"y": y, "x": x})]


def test_inputs_may_be_tuples_and_dicts(ranks):
    (x, a), (y, b) = data(0), data(1)
    expected = _two_losses(TwoInputs()(x, y), {"a": a, "b": b}).item()
    assert ranks(2, _forms)[0] == pytest.approx([expected] * 3, rel=1e-5)


def _weighted(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples count by a weight, which sum to less than one."""
    weights = targets[:, 0].abs() / 100
    return ((output - targets).square().mean(1) * weights).sum(), weights.sum()


def _loss_and_state(loss_fn: Any, sizes: list[int], fields: dict[str, Any]) -> tuple:
    engine = engine_of(Regular(), loss_fn=loss_fn, **fields)
    losses = []
    for step in range(3):
        parts = [t.split(sizes)[engine.mesh.dp_rank] for t in data(step, sum(sizes))]
        losses.append(engine.step(*parts).item())
    return losses, engine.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_fn", [squares, _weighted])
def test_ranks_may_have_different_numbers_of_samples(ranks, loss_fn, level):
    losses, state = ranks(2, _loss_and_state, loss_fn, [3, 2], dict(zero=level))[0]
    model = Regular()
    mean = loss_fn if loss_fn is squares else lambda output, targets: torch.div(*_weighted(output, targets))
    expected = list(plain_loop(model, ADAMW(model.parameters()), [[data(step, 5)] for step in range(3)], loss_fn=mean))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())


def test_micro_batches_of_different_weight(ranks):
    losses, state = ranks(2, _loss_and_state, _weighted, [6, 3], dict(zero=2, micro_batches=3))[0]
    model = Regular()
    mean = lambda output, targets: torch.div(*_weighted(output, targets))  # noqa: E731
    expected = list(plain_loop(model, ADAMW(model.parameters()), [[data(step, 9)] for step in range(3)], loss_fn=mean))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, model.state_dict())


def _nothing_counts() -> float:
    engine = parity.make_engine("gpt", dict(zero=1))
    inputs, targets = parity.batch("gpt", 0)
    return engine.step(*parity.shard(engine, inputs, torch.full_like(targets, -100))).item()


def test_a_batch_in_which_nothing_counts_has_a_loss_of_zero(ranks):
    assert ranks(2, _nothing_counts) == [0.0, 0.0]


# -- evaluation and randomness --


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.fixed = nn.BatchNorm1d(3).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed(self.layers(x))


def _evaluate(level: int) -> tuple:
    engine = engine_of(Noisy(), zero=level, clip_grad_norm=1.0)
    engine.model.fixed.eval()
    inputs, targets = data(0)
    squares(engine.model(*own_shard(engine, inputs)), *own_shard(engine, targets)).backward()
    before = engine.full_state_dict()
    gradients = [_local(p.grad).clone() for p in engine.sharded.masters().values()]
    random = torch.get_rng_state()
    found = engine.evaluate(*own_shard(engine, *data(1)))
    assert not found.requires_grad
    assert torch.equal(random, torch.get_rng_state())
    assert engine.step_count == 0 and engine.grad_norm is None
    assert all(torch.equal(_local(p.grad), g) for p, g in zip(engine.model.parameters(), gradients, strict=True))
    training = {name: module.training for name, module in engine.model.named_modules()}
    return found.item(), training, before, engine.full_state_dict()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("level", LEVELS)
def test_evaluation_leaves_the_state_of_training_alone(ranks, level):
    results = ranks(2, _evaluate, level)
    assert results[0][0] == results[1][0]
    loss, training, before, after = results[0]
    assert training.pop("fixed") is False and all(training.values())
    assert_same_state(after, before, 0.0)
    model = Noisy()
    model.load_state_dict(after)
    assert loss == pytest.approx(squares(model.eval()(data(1)[0]), data(1)[1]).item(), rel=1e-5)


def _noise(seed: int) -> list[float]:
    engine = engine_of(Noisy(), zero=3, seed=seed)
    inputs, targets = data(0)
    outputs = [engine.model(inputs).sum().item()]  # the same samples on both ranks
    return [*outputs, engine.step(*own_shard(engine, inputs, targets)).item()]


def test_dropout_differs_between_data_ranks_and_repeats_with_the_seed(ranks):
    first, again, other = ranks(2, _noise, 0), ranks(2, _noise, 0), ranks(2, _noise, 1)
    assert first == again
    assert first[0][0] != first[1][0]
    assert first[0][1] == first[1][1]
    assert first[0] != other[0]


# -- fp16 --


def _fp16_parity(level: int) -> list[float]:
    engine = parity.make_engine("vit", dict(zero=level, precision="fp16", clip_grad_norm=1.0))
    losses = [engine.step(*parity.shard(engine, *parity.batch("vit", step))).item() for step in range(8)]
    assert engine.scaler is not None and engine.scaler.scale == 2.0**16
    return losses


@pytest.mark.parametrize("level", LEVELS)
def test_fp16_trains(ranks, level):
    expected = parity.reference("vit", 1.0, steps=8)["losses"]
    assert ranks(2, _fp16_parity, level)[0] == pytest.approx(expected, rel=1e-2)


def _overflow(level: int) -> tuple:
    engine = engine_of(Block(6), loss_fn=_of_rank_1, zero=level, precision="fp16")
    assert engine.scaler is not None
    scales, changed = [], []
    inputs, targets = own_shard(engine, data(0)[0], torch.zeros(8, 6))
    for _ in range(12):
        before = [_local(p).clone() for p in engine.sharded.masters().values()]
        engine.step(inputs, targets)
        after = [_local(p) for p in engine.sharded.masters().values()]
        scales.append(engine.scaler.scale)
        changed.append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return scales, changed, engine.step_count, [_local(p).isfinite().all().item() for p in engine.model.parameters()]


def _of_rank_1(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Gradients that overflow in fp16 at the initial scale, on one rank alone."""
    return squares(output, targets) * (2.0**7 if dist.get_rank() == 1 else 2.0**-7)


@pytest.mark.parametrize("level", LEVELS)
def test_fp16_skips_steps_that_overflow_on_any_rank_and_goes_on(ranks, level):
    first, second = ranks(2, _overflow, level)
    scales, changed, steps, finite = first
    assert second[0] == scales and all(finite) and steps == 12
    skipped = changed.index(True)
    assert 1 <= skipped < 12
    assert scales[:skipped] == [2.0 ** (15 - i) for i in range(skipped)]  # halved each time
    assert all(changed[skipped:]) and set(scales[skipped:]) == {scales[skipped - 1]}
    if level in (0, 3):  # what forward computes with is on every rank
        assert second[1][skipped]


# -- options --


def _compiled(fields: dict[str, Any]) -> tuple:
    """Losses without and with compilation, and the modules that were compiled."""
    compiled = []

    def compile(forward: Any) -> Any:  # all but code generation, which takes a C++ compiler and its time
        compiled.append(type(forward.__self__).__name__)
        return original(forward, backend="aot_eager")

    original = torch.compile
    losses = []
    with unittest.mock.patch.object(torch, "compile", compile):
        for chosen in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(Block(4), Block(4)), nn.Linear(4, 3))
            engine = engine_of(model, compile=chosen, **fields)
            losses.append([engine.step(*own_shard(engine, *data(step))).item() for step in range(3)])
    return *losses, compiled


@pytest.mark.parametrize("level", [1, 3])
def test_compiled_blocks_compute_the_same(ranks, level):
    plain, losses, compiled = ranks(2, _compiled, dict(zero=level))[0]
    assert losses == pytest.approx(plain, rel=1e-5)
    assert compiled == ["Block", "Block"]


def _work(mode: str) -> tuple[int, int, list[float]]:
    """Calls of a block's norm, and matrix products, in one step."""
    engine = parity.make_engine("gpt", dict(recompute=mode))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    engine.model.blocks[0].mlp.up.register_forward_hook(count)
    with _Operations() as operations:
        loss = engine.step(*parity.batch("gpt", 0))
    return calls, operations.counts["addmm"], [loss.item(), *operations.counts.values()]


def test_recomputation_computes_again(ranks):
    none, selective, full = (ranks(1, _work, mode)[0] for mode in ("none", "selective", "full"))
    assert (none[0], selective[0], full[0]) == (1, 2, 2)
    assert none[1] == selective[1] < full[1]


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _parameters() -> list[nn.Parameter]:
    """All that there are in this process."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]


def _held(level: int) -> dict[str, int]:
    """Bytes of the tensors that there are: parameters, optimizer states, gradients before a step and within one."""
    others = _parameters()  # of earlier tests

    def parameters() -> list[nn.Parameter]:
        return [p for p in _parameters() if not p.is_meta and all(p is not other for other in others)]

    def gradients() -> int:
        return _bytes([_local(p.grad) for p in parameters() if p.grad is not None])

    engine = engine_of(nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]), zero=level)
    batch = torch.randn(2, WIDTH)
    engine.step(batch, batch)
    gc.collect()
    states = [v for state in engine.optimizer.state.values() for v in state.values() if v.dim() > 0]
    found = {"parameters": _bytes([_local(p) for p in parameters()]), "states": _bytes([_local(s) for s in states])}
    engine.sharded.begin_micro_batch(last=False)
    squares(engine.model(batch), batch).backward()
    found["accumulated"] = gradients()
    engine.sharded.begin_micro_batch(last=True)
    squares(engine.model(batch), batch).backward()
    engine.sharded.finish_backward()
    found["gradients"] = gradients()
    assert engine.sharded.held_numel() * 4 == found["parameters"]
    return found


WIDTH = 128
REPLICATED = 4 * WIDTH * WIDTH * 4


@pytest.mark.parametrize(
    ("level", "parameters", "states", "accumulated", "gradients"),
    [(0, 1, 1, 1, 1), (1, 1, 4, 1, 4), (2, 1, 4, 4, 4), (3, 4, 4, 4, 4)],
)
def test_what_a_level_shards_is_sharded(ranks, level, parameters, states, accumulated, gradients):
    for found in ranks(4, _held, level):
        assert found == {
            "parameters": REPLICATED // parameters,
            "states": 2 * REPLICATED // states,
            "accumulated": REPLICATED // accumulated,
            "gradients": REPLICATED // gradients,
        }


def _stack() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(8)])


def _whole_at_once(level: int) -> int:
    """The most bytes of whole initial values that were alive at any time."""
    alive: dict[int, int] = {}
    most = 0

    def tensor(self: Recording, name: str) -> torch.Tensor:
        nonlocal most
        value = original(self, name)
        alive[id(value.untyped_storage())] = value.nbytes
        weakref.finalize(value.untyped_storage(), alive.pop, id(value.untyped_storage()))
        most = max(most, sum(alive.values()))
        return value

    original = Recording.tensor
    with unittest.mock.patch.object(Recording, "tensor", tensor):
        engine_of(_stack, zero=level)
    return most


@pytest.mark.parametrize("level", [1, 3])
def test_a_callables_weights_are_made_one_unit_at_a_time(ranks, level):
    assert max(ranks(2, _whole_at_once, level)) <= 2 * WIDTH * WIDTH * 4


def _freed(fields: dict[str, Any]) -> list[bool]:
    engine = engine_of(Regular(), **fields)
    engine.step(*own_shard(engine, *data(0)))
    things = [weakref.ref(thing) for thing in (engine, engine.model, *engine.sharded.masters().values())]
    del engine
    gc.collect()
    return [thing() is None for thing in things]


@pytest.mark.parametrize("level", LEVELS)
def test_a_dropped_engine_gives_its_memory_back(ranks, level):
    assert all(ranks(2, _freed, dict(zero=level, precision="bf16"))[0])


def _summary() -> str:
    return parity.make_engine("gpt", dict(zero=1, precision="bf16")).summary().describe()


def test_the_summary_tells_what_is_held(ranks):
    total = sum(p.numel() for p in parity.build("gpt").parameters())
    text = ranks(2, _summary)[0]
    assert f"{total:,} in the model, {total:,} of them trained" in text
    assert "float32 master weights and optimizer states, bfloat16 computation, float32 gradient sums" in text
    assert "AdamW (fused)" in text
