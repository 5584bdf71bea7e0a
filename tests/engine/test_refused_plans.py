"""Until a plan is accepted, the module that it was for is the user's: as it was, and good for another plan."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parity
import tensorshard as ts
from tensorshard.models import GPT, next_token_loss

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def _gpt() -> nn.Module:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # weights of its own on each rank
    return GPT(61, 16, 2, 2, 30)


def _failing_optimizer(parameters: Any) -> torch.optim.Optimizer:
    raise KeyError("no optimizer today")


# what is refused: (the model, the plan, the optimizer, what is said)
REFUSED: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "a wrong table": (_gpt, dict(tp=2, tp_plan={"blocks.*.attention.qkv": "rowwise"}), ADAMW, "ValueError"),
    "a name in it": (_gpt, dict(tp=2, tp_plan={"layers.*": "colwise"}), ADAMW, "ValueError"),
    "no such unit": (
        _gpt,
        dict(pp=2, micro_batches=2, pp_units=["layers.*"]),
        ADAMW,
        "no module of the model is called",
    ),
    "no cut": (_gpt, dict(pp=2, micro_batches=2, pp_split=["blocks.7"]), ADAMW, "ValueError"),
    **{
        f"no optimizer at zero={level}": (_gpt, dict(zero=level), _failing_optimizer, "no optimizer today")
        for level in range(4)
    },
    "no optimizer under tp": (_gpt, dict(tp=2), _failing_optimizer, "no optimizer today"),
    "no optimizer under pp": (_gpt, dict(pp=2, micro_batches=2), _failing_optimizer, "no optimizer today"),
    "no optimizer in bf16": (
        _gpt,
        dict(zero=3, precision="bf16", recompute="full"),
        _failing_optimizer,
        "no optimizer today",
    ),
    "foreign parameters": (
        _gpt,
        dict(zero=1),
        lambda parameters: torch.optim.SGD([nn.Parameter(torch.zeros(7))], lr=0.1),
        "it was not given",
    ),
}


def _portrait(model: nn.Module) -> dict[str, Any]:
    """All that a user could notice of a module, by identity where that counts."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name} class"] = type(module)
        for key, value in vars(module).items():
            content = list(value.items()) if isinstance(value, dict) else value
            found[f"{name} {key}"] = (id(value), repr(content))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"tensor {name}"] = (id(tensor), tensor.device, tensor.requires_grad, dict(vars(tensor)))
    return found


def _refused(what: str, wrap: str) -> tuple[str, bool, bool, bool, list[float], list[float]]:
    build, fields, optimizer, _ = REFUSED[what]
    model = build()
    called = []
    handle = model.register_forward_hook(lambda *_: called.append(1))
    next(model.parameters()).note = "mine"  # type: ignore[attr-defined]
    model.head.eval()
    portrait, values = _portrait(model), {name: t.clone() for name, t in model.state_dict().items()}
    random = torch.get_rng_state()
    try:
        given = model if wrap == "module" else lambda: model
        ts.parallelize(given, ts.Plan(**fields), optimizer=optimizer, loss_fn=next_token_loss)
        message = "accepted"
    except (ValueError, KeyError) as error:
        message = f"{type(error).__name__}: {error}"
    same = _portrait(model) == portrait and torch.equal(random, torch.get_rng_state())
    equal = all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    tokens = parity.batch("gpt", 0, 4)[0]
    called.clear()  # a plan may have tried copies of the model, hooks and all
    model(tokens)
    handle.remove()
    model(tokens)
    # The same module, under a plan that can be honoured, trains the weights of the first rank.
    plain = build()
    plain.load_state_dict(values)
    for each in plain.state_dict().values():
        dist.broadcast(each, src=0)
    plain.train(), model.train()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    engine = ts.parallelize(model, ts.Plan(zero=1), optimizer=ADAMW, loss_fn=next_token_loss)
    losses, expected = [], []
    for step in range(3):
        inputs, targets = parity.batch("gpt", step, 4)
        half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        losses.append(engine.step(inputs[half], targets[half]).item())
        total, count = next_token_loss(plain(inputs), targets)
        (total / count).backward()
        expected.append((total / count).item())
        reference.step()
        reference.zero_grad()
    return message, same, equal, called == [1], losses, expected


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["module", pytest.param("callable", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_module_is_as_it_was_and_good_for_another_plan(ranks, what, wrap):
    for message, same, equal, called_once, losses, expected in ranks(2, _refused, what, wrap):
        assert message != "accepted" and REFUSED[what][3] in message
        assert same and equal and called_once
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def _refused_on_meta() -> bool:
    with torch.device("meta"):
        model = GPT(61, 16, 2, 2, 30)
    portrait = _portrait(model)
    for optimizer in (_failing_optimizer, _failing_optimizer):
        with pytest.raises(KeyError):
            ts.parallelize(model, ts.Plan(zero=1), optimizer=optimizer, loss_fn=next_token_loss)
    return _portrait(model) == portrait and all(p.is_meta for p in model.parameters())


def test_a_meta_module_stays_on_the_meta_device(ranks):
    assert ranks(1, _refused_on_meta) == [True]


def _left_of_the_users_tensors() -> int:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    engine = ts.parallelize(model, ts.Plan(zero=0), optimizer=ADAMW, loss_fn=nn.functional.mse_loss)
    gc.collect()
    assert engine.step_count == 0
    return sum(reference() is not None for reference in references)


def test_an_accepted_plan_keeps_no_copy_of_the_weights(ranks):
    assert ranks(1, _left_of_the_users_tensors) == [0]
