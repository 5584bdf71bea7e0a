"""A loop of one's own honours the Plan: precision, micro-batches, clipping, loss scaling, finite gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parity
import tensorshard as ts
from engines import ADAMW, assert_same_state, engine_of, own_shard
from tensorshard.engine.engine import NonFiniteLossError
from toys import Regular, data, plain_loop, squares

_CLIP = 0.2


def _engine(fields: dict[str, Any], model: Callable[[], nn.Module] = Regular, **options: Any) -> ts.Engine:
    engine = engine_of(model(), **options, **fields)
    if engine.scaler is not None:
        engine.scaler.scale = 64.0  # the usual first one overflows
    return engine


def _parts(engine: ts.Engine, step: int) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(t.chunk(engine.plan.micro_batches) for t in own_shard(engine, *data(step))), strict=True))


def _own_loop(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All of a step under accumulate(), as with Accelerate."""
    engine = _engine(fields, clip_grad_norm=_CLIP)
    for step in range(2):
        for inputs, targets in _parts(engine, step):
            with engine.accumulate():
                output = engine.model(inputs)
                assert output.dtype == torch.float32
                engine.backward(squares(output, targets))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        assert engine.grad_norm > _CLIP and engine.step_count == step + 1
    return engine.full_state_dict()


def _update_after_all(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The update after a loop over the micro-batches, as in plain PyTorch, and losses given as (sum, count)."""
    engine = _engine(fields, clip_grad_norm=_CLIP)
    for step in range(2):
        for inputs, targets in _parts(engine, step):
            difference = (engine.model(inputs) - targets).square()
            engine.backward((difference.sum(), difference.numel()))
        assert engine.gradient_norm() > _CLIP
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return engine.full_state_dict()


def _stepped(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = _engine(fields, clip_grad_norm=_CLIP)
    for step in range(2):
        engine.step(*own_shard(engine, *data(step)))
    return engine.full_state_dict()


# ZeRO 0 to 3, compared with one process; 16 bits, with what step does.
_PLANS: list[tuple[Callable[[dict[str, Any]], dict[str, torch.Tensor]], dict[str, Any]]] = [
    (_own_loop, dict(zero=0, micro_batches=2)),
    (_update_after_all, dict(zero=1, micro_batches=2)),
    (_own_loop, dict(zero=2, micro_batches=2)),
    (_update_after_all, dict(zero=3, micro_batches=2, recompute="full")),
    (_own_loop, dict(zero=2, precision="bf16")),
    (_update_after_all, dict(zero=3, micro_batches=2, precision="bf16")),
    (_own_loop, dict(zero=1, micro_batches=2, precision="fp16")),
]


def _under_all_plans() -> list[tuple]:
    return [(loop(fields), "precision" in fields and _stepped(fields)) for loop, fields in _PLANS]


@pytest.mark.slow
def test_a_loop_of_ones_own_is_exact_under_every_plan(ranks):
    model = Regular()
    list(plain_loop(model, ADAMW(model.parameters()), [[data(step)] for step in range(2)], clip=_CLIP))
    for own, stepped in ranks(2, _under_all_plans)[0]:
        assert_same_state(own, stepped or model.state_dict())


def _gpt(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = parity.make_engine("gpt", dict(clip_grad_norm=0.5, **fields))
    loss_fn = parity.loss_function("gpt")
    for step in range(2):
        inputs, targets = parity.shard(engine, *parity.batch("gpt", step))
        for x, t in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            with engine.accumulate():
                engine.backward(loss_fn(engine.model(x), t))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
    return engine.full_state_dict()


def _gpt_under_tp() -> list[dict[str, torch.Tensor]]:
    return [_gpt(dict(tp=2, micro_batches=2)), _gpt(dict(tp=2, micro_batches=2, precision="bf16"))]


@pytest.mark.slow
def test_tensor_parallelism_is_exact_with_tokens_that_vary(ranks):
    expected = parity.reference("gpt", clip=0.5, steps=2)["state"]
    fp32, bf16 = ranks(2, _gpt_under_tp)[0]
    parity.assert_same_state(fp32, expected, 1e-5)
    parity.assert_same_state(bf16, expected, 2e-2)


# -- what is refused, and with which words --


def _messages(fields: dict[str, Any], *calls: Any) -> list[str]:
    found = []
    for call in calls:
        engine = engine_of(Regular(), **fields)
        try:
            call(engine)
            found.append("")
        except (RuntimeError, ValueError, TypeError, NonFiniteLossError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _loss(engine: ts.Engine) -> torch.Tensor:
    inputs, targets = data(0)
    return squares(engine.model(inputs), targets)


def _plain_backward(engine: ts.Engine) -> None:
    _loss(engine).backward()


def _step_too_early(engine: ts.Engine) -> None:
    engine.backward(_loss(engine))
    engine.optimizer.step()


def _norm_too_early(engine: ts.Engine) -> None:
    engine.backward(_loss(engine))
    engine.gradient_norm()


def _mixed_losses(engine: ts.Engine) -> None:
    engine.backward(_loss(engine))
    engine.backward((_loss(engine), 8))


def _nested(engine: ts.Engine) -> None:
    with engine.accumulate(), engine.accumulate():
        pass


def _no_backward(engine: ts.Engine) -> None:
    with engine.accumulate():
        _loss(engine)


def _detached(engine: ts.Engine) -> None:
    engine.backward(_loss(engine).detach())


def _vector(engine: ts.Engine) -> None:
    engine.backward(engine.model(data(0)[0]))


def _nan(engine: ts.Engine) -> None:
    (_loss(engine) * float("nan")).backward()
    engine.optimizer.step()


def _hooked(engine: ts.Engine) -> None:
    engine.model.wide.weight.register_hook(lambda grad: grad.sum())
    _plain_backward(engine)
    engine.optimizer.step()


def _hook_of_another_shape(engine: ts.Engine) -> None:
    engine.register_gradient_hook(lambda name, grad: grad.sum())
    _plain_backward(engine)
    engine.optimizer.step()


def _all_messages() -> list[str]:
    return [
        *_messages(
            dict(micro_batches=2),
            _plain_backward,
            _step_too_early,
            _norm_too_early,
            _mixed_losses,
            _nested,
            _no_backward,
        ),
        *_messages(dict(precision="fp16"), _plain_backward),
        *_messages(dict(), _detached, _vector, _nan, _hooked, _hook_of_another_shape),
    ]


def test_what_cannot_be_honoured_is_refused_by_name(ranks):
    expected = [
        "RuntimeError: loss.backward() was called under a plan with micro_batches=2: call engine.backward(loss)",
        "RuntimeError: engine.optimizer.step() was called after 1 of the plan's micro_batches=2: call engine.backward",
        "RuntimeError: engine.gradient_norm() was called after 1 of the plan's micro_batches=2",
        "TypeError: engine.backward was given a mean for one micro-batch and (sum, count) for another",
        "RuntimeError: engine.accumulate() was entered within itself",
        "RuntimeError: engine.accumulate() surrounded 0 calls of engine.backward(loss); it surrounds one micro-batch",
        "RuntimeError: loss.backward() was called under a plan with precision='fp16', whose losses are scaled: call",
        "ValueError: the loss has no gradient",
        "TypeError: engine.backward was given a tensor of shape (8, 3); it must be given a scalar tensor",
        "NonFiniteLossError: the norm of the gradient of step 1 is nan; the step was not taken",
        "TypeError: a gradient hook returned Tensor [] for 'wide.weight'; it must return None, or a tensor like",
        "TypeError: a gradient hook returned Tensor [] for 'shift'; it must return None, or a tensor like",
    ]
    for message, start in zip(ranks(1, _all_messages)[0], expected, strict=True):
        assert message.startswith(start)


def _pipeline() -> list[str]:
    engine = parity.make_engine("gpt", dict(pp=2, micro_batches=2))
    calls = [engine.accumulate().__enter__, lambda: engine.backward(torch.zeros(())), engine.optimizer.step]
    found = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        found.append(str(caught.value))
    assert engine.step(*parity.batch("gpt", 0)).isfinite()
    return found


def test_a_pipeline_is_refused_with_the_remedy(ranks):
    for message in ranks(2, _pipeline)[0]:
        assert "under a plan with pp=2" in message and "use engine.step(inputs, targets)" in message


def _clipped_by_hand(fields: dict[str, Any], by_torch: bool) -> Any:
    engine = parity.make_engine("gpt", fields)
    for step in range(2):
        inputs, targets = parity.shard(engine, *parity.batch("gpt", step))
        total, count = parity.loss_function("gpt")(engine.model(inputs), targets)
        engine.backward((total, count))
        if by_torch:
            torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 0.5)
        else:
            assert engine.clip_grad_norm_(0.5) > 0.5
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return engine.full_state_dict()


def _clipped_in_both_ways() -> tuple[Any, Any]:
    return _clipped_by_hand(dict(tp=2), by_torch=True), _clipped_by_hand(dict(tp=2), by_torch=False)


@pytest.mark.slow
def test_clipping_by_torch_and_by_the_engine_under_tp(ranks):
    """Split parameters look whole, and so do their gradients."""
    for state in ranks(2, _clipped_in_both_ways)[0]:
        parity.assert_same_state(state, parity.reference("gpt", clip=0.5, steps=2)["state"], 1e-5)


def _hooks_and_closures(fields: dict[str, Any]) -> float:
    """The loss after two steps: gradients halved by a hook, in a closure; and two halves, accumulated by hand."""
    torch.manual_seed(0)
    engine = _engine(fields, partial(nn.Linear, 6, 3), optimizer=partial(torch.optim.SGD, lr=0.5))
    x, t = own_shard(engine, *data(0))

    def closure() -> torch.Tensor:
        engine.optimizer.zero_grad()
        loss = squares(engine.model(x), t)
        engine.backward(loss)
        return loss

    handle = engine.register_gradient_hook(lambda name, grad: grad / 2)
    assert engine.optimizer.step(closure).isfinite()
    handle.remove()
    engine.optimizer.zero_grad()
    for _ in range(2):
        engine.backward(squares(engine.model(x), t) / 4)
    norm = engine.gradient_norm()
    engine.optimizer.step()
    assert engine.grad_norm == norm
    engine.optimizer.zero_grad()
    return engine.evaluate(x, t).item()


_HOOKED_PLANS: list[dict[str, Any]] = [dict(zero=3), dict(zero=0), dict(zero=1), dict(precision="fp16")]


def _under_hooked_plans() -> list[float]:
    return [_hooks_and_closures(fields) for fields in _HOOKED_PLANS]


def test_gradient_hooks_closures_and_accumulation_by_hand(ranks):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    expected = list(plain_loop(model, optimizer, [[data(0)]] * 3))[2]
    for fields, found in zip(_HOOKED_PLANS, ranks(2, _under_hooked_plans)[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-2 if "precision" in fields else 1e-5)


def _windows(fields: dict[str, Any], own: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """Two epochs of 7 batches, with an update for two of them and for the last."""
    engine = engine_of(nn.Linear(6, 3), **fields)
    data = TensorDataset(torch.randn(28, 6, generator=torch.Generator().manual_seed(1)), torch.randn(28, 3))
    loader = DataLoader(data, 4) if own else engine.loader(data, batch_size=4, shuffle=False)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            with engine.accumulate(last=number == 6 if own else None):
                engine.backward(nn.functional.mse_loss(engine.model(x), 0 * y))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
    return engine.step_count, engine.full_state_dict()


def _windows_alone() -> dict[str, torch.Tensor]:
    engine = engine_of(nn.Linear(6, 3), zero=0)
    data = torch.randn(28, 6, generator=torch.Generator().manual_seed(1)).split(4)
    for _ in range(2):
        for first in range(0, 7, 2):
            window = data[first : first + 2]
            engine.backward(
                sum(nn.functional.mse_loss(engine.model(x), torch.zeros(4, 3)) for x in window) / len(window)
            )
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return engine.full_state_dict()


@pytest.mark.parametrize(("size", "own"), [(1, True), (1, False), (2, False)])
def test_the_rest_of_an_epoch_is_a_step(ranks, size, own):
    expected = ranks(1, _windows_alone)[0]
    steps, found = ranks(size, _windows, dict(zero=1, micro_batches=2), own)[0]
    assert steps == 8
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
