"""What ``engine.model`` is on a rank of a pipeline: the model's names, and a sentence for what other ranks have."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts

PLANS = [
    dict(pp=2, micro_batches=2),
    dict(pp=2, micro_batches=4, pp_schedule="interleaved_1f1b"),
    dict(pp=2, micro_batches=4, pp_schedule="zbv", zero=1),
]


class Net(nn.Module):
    """Four blocks, a parameter and a buffer of its own, and a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 8}
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("offset", torch.zeros(8))
        self.head = nn.Linear(8, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x) * self.scale + self.offset)


def _engine(fields: dict[str, Any], loss_fn: Any = nn.functional.cross_entropy) -> ts.Engine:
    torch.manual_seed(0)
    return ts.parallelize(Net(), ts.Plan(**fields), optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=loss_fn)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def _names(fields: dict[str, Any]) -> Any:
    engine = _engine(fields)
    engine.step(*_batch())
    model = engine.model
    assert isinstance(model, Net) and model.config == {"width": 8} and len(model.blocks) == 4
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return (
        list(values),
        [name for name, _ in model.named_modules()],
        [name for name, _ in model.named_buffers()],
        engine.full_state_dict(),
        {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in values.items()},
    )


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_names_are_those_of_the_model(ranks, fields):
    whole = Net()
    results = ranks(2, _names, fields)
    parameters = [name for result in results for name in result[0]]
    assert sorted(parameters) == sorted(name for name, _ in whole.named_parameters())
    modules = [name for result in results for name in result[1]]
    assert set(modules) == {name for name, _ in whole.named_modules()}
    assert all(modules.count(name) == 1 for name in modules if name not in ("", "blocks"))
    assert all(result[2] == ["offset"] for result in results)
    full = results[0][3]
    for result in results:
        for name, value in result[4].items():
            assert torch.equal(value, full[name])


def _refusals(fields: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    engine = _engine(fields)
    model, (x, _) = engine.model, _batch()
    first = "blocks.0.0.weight" in dict(model.named_parameters())
    other, own = (model.head, model.blocks[0]) if first else (model.blocks[0], model.head)
    layer = other if first else other[0]
    found: dict[str, tuple[str, ...]] = {}
    for when in ("before", "after"):
        found[when] = (
            _message(lambda: layer.weight.square().sum()),
            _message(layer.weight.zero_),
            _message(lambda: nn.functional.linear(x, layer.weight)),
            _message(lambda: layer.weight.grad),
            _message(lambda: copy.deepcopy(layer.weight)),
            _message(lambda: list(other.parameters())),
            _message(other.state_dict),
            _message(lambda: list(other.modules())),
            _message(lambda: other.register_forward_hook(lambda *_: None)),
            _message(lambda: other(x)),
            _message(lambda: model.encode(x)),
            _message(lambda: model(x)),
            _message(lambda: torch.func.functional_call(model, {}, (x,))),
            _message(lambda: engine.backward(torch.ones((), requires_grad=True))),
        )
        assert layer.weight.shape[1] == 8 and layer.weight.dtype == torch.float32 and len(layer.weight)
        assert own(x).shape[0] == 8
        other.requires_grad_(False).requires_grad_(True)
        layer.weight.requires_grad_(False).requires_grad_(True)
        engine.step(*_batch())
    return found


@pytest.mark.parametrize("fields", PLANS[:2], ids=str)
def test_what_other_ranks_have_says_so(ranks, fields):
    for found in ranks(2, _refusals, fields):
        for messages in found.values():
            assert all("pp=2" in message for message in messages), messages
            for message in messages[:9]:
                assert "this rank has stage" in message and "is on stage" in message
            assert "engine.add_penalty(function)" in messages[0]
            assert "engine.step, engine.evaluate" in messages[-3]


def _lists_in_the_loss(fields: dict[str, Any], listed: str) -> str:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        module = engine.model.get_submodule(listed)
        penalty = sum(parameter.square().sum() for parameter in module.parameters())
        return nn.functional.cross_entropy(output, target) + penalty

    engine = _engine(fields, loss_fn)
    if listed == "head":
        return str(engine.step(*_batch()).item())
    before = engine.full_state_dict()
    message, evaluated = (_message(partial(call, *_batch())) for call in (engine.step, engine.evaluate))
    after = engine.full_state_dict()
    assert message == evaluated and all(torch.equal(before[name], after[name]) for name in before)
    return message


@pytest.mark.parametrize("listed", ["", "blocks", "head"])
def test_a_sum_over_parameters_in_the_loss_is_whole_or_refused(ranks, listed):
    fields = dict(pp=2, micro_batches=2)
    for found in ranks(2, _lists_in_the_loss, fields, listed):
        if listed == "head":  # all of it is where the loss is computed
            assert found == ranks(1, _lists_in_the_loss, dict(micro_batches=2), listed)[0]
        else:
            assert "engine.add_penalty(function)" in found


def _hook_on_the_output(fields: dict[str, Any]) -> list[tuple[int, ...]]:
    engine = _engine(fields)
    seen: list[tuple[int, ...]] = []
    if engine.sharded.stages[-1].is_last:
        engine.model.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    engine.step(*_batch())
    return seen


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_a_late_hook_on_the_model_sees_its_output(ranks, fields):
    shape = (8 // fields["micro_batches"], 3)
    first, second = ranks(2, _hook_on_the_output, fields)
    assert first + second == [shape] * fields["micro_batches"]


def _modes(fields: dict[str, Any]) -> list[bool]:
    engine = _engine(fields)
    engine.model.eval()
    engine.model.blocks[1].train()
    engine.sharded.follow_modes()
    modes = [module.training for stage in engine.sharded.stages for module in stage.module.blocks]
    modes += [stage.module.training for stage in engine.sharded.stages]
    engine.step(*_batch())
    return modes


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_all_stages_follow_the_modes_of_the_model(ranks, fields):
    for modes in ranks(2, _modes, fields):
        stages = len(modes) // 5
        assert modes == [False, True, False, False] * stages + [False] * stages


class Tied(Net):
    """Its last layer uses a weight of the first block, whose name the weight has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.head.weight = self.blocks[0][0].weight


def _names_of_tied(fields: dict[str, Any]) -> list[str]:
    engine = ts.parallelize(
        Tied(), ts.Plan(**fields), optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=nn.functional.cross_entropy
    )
    names = [name for name, _ in engine.model.named_parameters()]
    assert set(names) == set(engine.sharded.masters())
    engine.step(*_batch())
    return names


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_a_tied_parameter_has_its_first_name_on_every_stage(ranks, fields):
    whole = {name for name, _ in Tied().named_parameters()}
    names = ranks(2, _names_of_tied, fields)
    assert set().union(*names) == whole
    assert all("blocks.0.0.weight" in each for each in names if "head.bias" in each or "blocks.0.0.bias" in each)
