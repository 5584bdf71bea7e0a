"""Averages of the weights: what AveragedModel holds in one process, under every plan and in checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import parity
import tensorshard as ts
from engines import assert_same_state
from tensorshard.models import next_token_loss

STEPS = 6
DECAYS: dict[str, Any] = {"ema": 0.7, "mean": None, "warm-up": lambda updates: min(0.9, (1 + updates) / (10 + updates))}
KINDS = {
    **{kind: (decay, "first_update") for kind, decay in DECAYS.items()},
    **{f"initial {kind}": (decay, "initial") for kind, decay in DECAYS.items()},
}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, dict(zero=3)),
    "zero1": (2, dict(zero=1)),
    "zero2": (2, dict(zero=2)),
    "zero0": (2, dict(zero=0)),
    "tp": (2, dict(tp=2)),
    "pp": (2, dict(pp=2, micro_batches=2)),
    "hybrid": (4, dict(dp_replicate=2, zero=3, recompute="full")),
    "tp-zero2": (4, dict(tp=2, zero=2)),
    "overlap": (2, dict(zero=2, offload=ts.Offload(optimizer="cpu", overlap=True))),
    "disk": (2, dict(zero=3, offload="disk")),
}


def _alone(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the average after each step, and the average, in plain torch."""
    decay, start = KINDS[kind]
    model = parity.build("gpt")
    optimizer = parity.ADAMW(model.parameters())
    choose = {} if decay is None else {"multi_avg_fn": _moving(decay)}
    averaged = AveragedModel(model, **choose)
    if start == "initial":
        averaged.update_parameters(model)  # which copies them
    losses = []
    for step in range(STEPS):
        inputs, targets = parity.batch("gpt", step)
        _mean_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        with torch.no_grad():
            losses.append(_mean_loss(averaged(inputs), targets).item())
    return losses, averaged.module.state_dict()


def _mean_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    total, count = next_token_loss(output, targets)
    return total / count


def _moving(decay: Any) -> Callable[..., None]:
    if not callable(decay):
        return get_ema_multi_avg_fn(decay)

    def move(averages: list[torch.Tensor], values: list[torch.Tensor], updates: Any) -> None:
        for average, value in zip(averages, values, strict=True):
            average.lerp_(value, 1 - decay(int(updates)))

    return move


def _averaged(fields: dict[str, Any], kind: str, folder: Path) -> tuple[list[float], Any, Any, float]:
    engine = parity.make_engine("gpt", fields)
    decay, start = KINDS[kind]
    average = engine.average(decay, start=start)
    losses = []
    for step in range(STEPS):
        batch = parity.shard(engine, *parity.batch("gpt", step))
        engine.step(*batch)
        before = engine.full_state_dict()
        with average.applied():
            losses.append(engine.evaluate(*batch).item())
            state = engine.full_state_dict()
        after = engine.full_state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    engine.save(folder / "saved")
    logits = average(batch[0])
    return losses, state, after, engine.gather(logits.double().sum()).sum().item()


def _loaded(fields: dict[str, Any], folder: Path) -> tuple[Any, int, list[str]]:
    engine = parity.make_engine("gpt", fields)
    engine.load(folder / "saved")  # without the average, which is left out
    average = engine.average(0.7)
    refusals = [_refusal(lambda: engine.average(0.7)), _refusal(lambda: engine.average(1.5, name="other"))]
    refusals += [_refusal(lambda: engine.average(name="a.b")), _refusal(lambda: engine.average(name="c", every=0))]
    refusals.append(_refusal(lambda: engine.average(name="c", start="first")))
    engine.load(folder / "saved")
    with average.applied():
        state = engine.full_state_dict()
        batch = parity.shard(engine, *parity.batch("gpt", 0))
        refusals += [_refusal(lambda: engine.step(*batch)), _refusal(lambda: engine.save(folder / "never"))]
        refusals += [_refusal(lambda: average(batch[0])), _refusal(lambda: engine.load(folder / "saved"))]
    by_hand = engine.average(None, every=None, name="by_hand")
    engine.step(*batch)
    assert by_hand.updates == 0 and average.updates == STEPS + 1
    by_hand.update()
    with by_hand.applied():
        current = engine.full_state_dict()
    after = engine.full_state_dict()
    assert all(torch.equal(value, after[name]) for name, value in current.items())
    refusals.append(_refusal(lambda: engine.load(folder / "saved")))
    return state, average.updates, refusals


def _refusal(call: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        call()
    return str(error.value)


@pytest.mark.fast_cases("zero3-ema")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_it_is_what_one_process_averages(ranks, tmp_path, plan, kind):
    size, fields = PLANS[plan]
    expected, average = ranks(1, _alone, kind)[0]
    found = ranks(size, _averaged, fields, kind, tmp_path)
    losses, state, weights, _ = found[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_state(state, average)
    assert any(not torch.equal(value, weights[name]) for name, value in state.items())
    assert len({logits for *_, logits in found}) == 1


@pytest.mark.slow
def test_checkpoints_hold_it_for_other_plans(ranks, tmp_path):
    _, average, _, _ = ranks(2, _averaged, dict(zero=3), "ema", tmp_path)[0]
    state, updates, refusals = ranks(2, _loaded, dict(zero=1), tmp_path)[0]
    assert updates == STEPS + 1
    assert all(torch.equal(value, state[name]) for name, value in average.items())
    for refusal, words in zip(
        refusals,
        (
            "there is an average called 'average' already", "must be a number from 0 to 1", "a word without dots",
            "at least 1", "start='first'; it must be 'first_update'", "an update of the weights was asked for while",
            "engine.save was asked for while", "applied() of the average 'average' was asked for while",
            "engine.load was asked for while", "has no average 'by_hand'",
        ),
        strict=True,
    ):  # fmt: skip
        assert words in refusal


def _from_the_initial_weights(path: Path) -> list[dict[str, torch.Tensor]]:
    """What the usual loop's average has before and after its first update, and after one of a loaded checkpoint."""
    states = []
    for level in (1, 3):
        engine = parity.make_engine("gpt", dict(zero=level))
        average = engine.average(0.7, start="initial")
        if level == 1:
            states.append(engine.full_state_dict())
            engine.save(path)
        else:
            engine.load(path)
        engine.step(*parity.shard(engine, *parity.batch("gpt", 0)))
        if level == 1:
            states.append(engine.full_state_dict())
        with average.applied():
            states.append(engine.full_state_dict())
    return states


@pytest.mark.slow
def test_it_begins_with_the_initial_weights(ranks, tmp_path):
    initial, first, *averages = ranks(2, _from_the_initial_weights, tmp_path / "saved")[0]
    for average in averages:
        assert_same_state(average, {name: 0.7 * initial[name] + 0.3 * first[name] for name in first})


def _grown(engine: ts.Engine | None) -> dict[str, torch.Tensor]:
    """An average of which the half joins later."""
    if engine is None:
        model = parity.build("gpt")
        optimizer = parity.ADAMW(list(model.parameters()))
        model.blocks.requires_grad_(False)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    else:
        engine.freeze("blocks")
        average = engine.average(0.5)
    for step in range(4):
        inputs, targets = parity.batch("gpt", step)
        if engine is not None:
            if step == 2:
                engine.unfreeze("blocks")
            engine.step(*parity.shard(engine, inputs, targets))
            continue
        model.blocks.requires_grad_(step >= 2)
        _mean_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    if engine is None:
        return averaged.module.state_dict()
    with average.applied():
        return engine.full_state_dict()


def _grown_under(fields: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    return _grown(None if fields is None else parity.make_engine("gpt", fields))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_what_is_unfrozen_joins_it(ranks, plan):
    size, fields = PLANS[plan]
    assert_same_state(ranks(size, _grown_under, fields)[0], ranks(1, _grown_under, None)[0])
