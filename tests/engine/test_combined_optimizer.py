"""Several optimizers as one, by a list or by a dict of patterns."""

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import optimizers
import tensorshard as ts
from engines import assert_same_state, engine_of, own_shard
from tensorshard.engine.combined_optimizer import ByParameter, CombinedOptimizer
from toys import Regular, data, plain_loop

SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
BY_NAME = {"*norm*": SGD, "blocks.*": ADAMW, "*": partial(torch.optim.SGD, lr=2e-2)}


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "narrow" not in name


def _train(make: Any, fields: dict[str, Any]) -> tuple:
    engine = engine_of(Regular(), make, **fields)
    scheduler = LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        engine.step(*own_shard(engine, *data(step)))
        scheduler.step()
    kinds = [type(member).__name__ for member in engine.optimizer.members]
    return engine.full_state_dict(), kinds, [group["lr"] for group in engine.optimizer.param_groups]


@pytest.mark.slow_cases("0", "2")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (BY_NAME, ["SGD", "AdamW", "SGD"]),
        ({_is_matrix: optimizers.Muon, "*": ADAMW}, ["Muon", "AdamW"]),
    ],
    ids=["names", "predicate"],
)
def test_a_dict_gives_each_parameter_to_the_first_key_that_matches(ranks, make, kinds, level):
    state, found, rates = ranks(2, _train, make, dict(zero=level))[0]
    assert found == kinds
    model = Regular()
    given = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    chosen = ByParameter(make).choose(given)
    alone = CombinedOptimizer([f([p for _, p in some]) for f, some in zip(make.values(), chosen, strict=True)])
    scheduler = LambdaLR(alone, lambda step: 1 / (1 + step))
    for step in range(4):
        list(plain_loop(model, alone, [[data(step)]]))
        scheduler.step()
    assert rates == [group["lr"] for group in alone.param_groups]
    assert_same_state(state, model.state_dict())


def _parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 3)) for _ in range(3)]


def test_a_state_dict_holds_the_states_of_all_members():
    def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], numbers: range) -> None:
        for number in numbers:
            for p in parameters:
                p.grad = torch.full_like(p, float(number))
            optimizer.step()

    def build(parameters: list[nn.Parameter]) -> CombinedOptimizer:
        return CombinedOptimizer([SGD(parameters[:1]), ADAMW(parameters[1:])])

    first = _parameters()
    one = build(first)
    steps(one, first, range(3))
    second = copy.deepcopy(first)
    other = build(second)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    one.param_groups[1]["lr"] = other.param_groups[1]["lr"] = 0.5
    steps(one, first, range(3, 6))
    steps(other, second, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    assert set(other.state) == set(second)


def test_what_cannot_be_is_refused():
    parameters = _parameters()
    with pytest.raises(ValueError, match=r"shape \[3, 3\] to the SGD and to the AdamW"):
        CombinedOptimizer([SGD(parameters), ADAMW(parameters[:1])])
    combined = CombinedOptimizer([SGD(parameters[:2]), ADAMW(parameters[2:])])
    with pytest.raises(RuntimeError, match=r"several optimizers at once \(SGD with AdamW\)"):
        combined.add_param_group({"params": _parameters()})


_BAD: dict[str, Any] = {
    "empty dict": {},
    "a key of the dict optimizer= is 3": {3: SGD},
    r"optimizer\['\*'\] is a str": {"*": "sgd"},
    r"no key .* matches the trained parameter 'bias'": {"weight": SGD},
    r"optimizer\['\*bias'\] would train nothing": {"*": SGD, "*bias": ADAMW},
    "returned an empty list": lambda parameters: [],
    "returned an int in a list": lambda parameters: [SGD(parameters), 3],
    "to the SGD and to the AdamW": lambda parameters: [SGD(parameters), ADAMW(parameters)],
    "optimizer is a list; it must be a callable .* or a dict": [SGD, ADAMW],
}


def _said(optimizer: Any) -> str:
    try:
        ts.parallelize(nn.Linear(2, 2), ts.Plan(), optimizer=optimizer, loss_fn=nn.functional.mse_loss)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing"


def _all_said() -> list[str]:
    return [_said(optimizer) for optimizer in _BAD.values()]


def test_bad_arguments_are_sentences(ranks):
    for expected, said in zip(_BAD, ranks(1, _all_said)[0], strict=True):
        assert re.search(expected, said), said
