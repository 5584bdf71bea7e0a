"""What user code meets of a parameter is the same at every ZeRO level: one plain, full tensor for life."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from engines import own_shard
from rank_pool import RankError
from tensorshard.comm.collectives import all_gather_into
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors

LEVELS = [0, 1, 2, 3]
SGD = partial(torch.optim.SGD, lr=0.5)


class Net(nn.Module):
    """Blocks, and layers around them that are in no unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def _batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def _engine(**fields: Any) -> ts.Engine:
    return ts.parallelize(Net(), ts.Plan(**fields), optimizer=SGD, loss_fn=_loss, device="cpu")


def _looked_at(zero: int) -> dict[str, Any]:
    engine = _engine(zero=zero)
    model, before = engine.model, dict(engine.model.named_parameters())
    engine.step(*own_shard(engine, *_batch()))
    outputs = {}
    with torch.inference_mode():
        outputs["inference"] = model(_batch()[0])
        outputs["loss"] = engine.evaluate(*own_shard(engine, *_batch(1)))
    outputs["copy"] = copy.deepcopy(model)(_batch()[0]).detach()
    outputs["block"] = copy.deepcopy(model.blocks[1])(torch.ones(1, 8)).detach()
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)
    file.seek(0)
    outputs["file"] = torch.cat([p.detach().flatten() for p in torch.load(file, weights_only=True)])
    outputs["state"] = torch.cat([value.flatten() for value in model.state_dict().values()])
    outputs["norms"] = torch.stack([p.norm() for p in model.parameters()]).detach()
    assert model.to("cpu").float() is model
    with pytest.raises(RuntimeError, match=r"was given other memory .* of torch.float16 .*: set the type in Plan"):
        model.half()
    engine.step(*own_shard(engine, *_batch(1)))
    assert all(p is before[name] and isinstance(p, nn.Parameter) for name, p in model.named_parameters())
    assert [type(p.detach()) for p in model.parameters()] == [torch.Tensor] * len(before)
    outputs["after"] = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {name: value.clone() for name, value in outputs.items()}


def test_what_code_sees_does_not_depend_on_the_level(ranks):
    expected = ranks(1, _looked_at, 0)[0]
    for zero in LEVELS:
        for found in ranks(2, _looked_at, zero):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _clamped(zero: int, own_loop: bool, micro_batches: int) -> torch.Tensor:
    """The weights after steps in which a block's backward clamps the gradient that flows through it."""
    engine = _engine(zero=zero, micro_batches=micro_batches)
    engine.model.blocks[1].register_full_backward_hook(lambda _, given, __: (given[0].clamp(-2e-3, 2e-3),))
    for step in range(3):
        inputs, targets = own_shard(engine, *_batch(step))
        if not own_loop:
            engine.step(inputs, targets)
            continue
        for part in range(micro_batches):
            x, y = inputs.chunk(micro_batches)[part], targets.chunk(micro_batches)[part]
            engine.backward(_loss(engine.model(x), y))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in engine.model.parameters()]).clone()


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("own_loop", [False, True])
def test_what_flows_through_backward_is_what_flows_on_one_process(ranks, own_loop, micro_batches):
    model = Net()
    model.blocks[1].register_full_backward_hook(lambda _, given, __: (given[0].clamp(-2e-3, 2e-3),))
    optimizer = SGD(model.parameters())
    for step in range(3):
        _loss(model(_batch(step)[0]), _batch(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for zero in LEVELS:
        for found in ranks(2, _clamped, zero, own_loop, micro_batches):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _overflows(zero: int, size: float) -> list[float]:
    """The scale of fp16 after each step, for losses so large that gradients overflow at first."""
    engine = _engine(zero=zero, precision="fp16")
    scales = []
    for step in range(4):
        inputs, targets = own_shard(engine, *_batch(step))
        engine.step(inputs, targets * size)
        scales.append(engine.scaler.scale)
    return scales


@pytest.mark.slow
def test_the_scale_that_overflows_is_that_of_one_process(ranks):
    expected = ranks(1, _overflows, 0, 60.0)[0]
    assert expected[0] < 2.0**16, expected
    for zero in LEVELS:
        assert ranks(2, _overflows, zero, 60.0) == [expected] * 2


def _hook(model: nn.Module, seen: list[float]) -> list[Any]:
    """Hooks on parameters: one clamps, one reads, one changes the gradient that the parameter has."""

    def unit(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(0.5 / parameter.grad.norm())

    named = dict(model.named_parameters())
    return [
        named["inlet.weight"].register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2)),
        named["blocks.1.weight"].register_hook(lambda gradient: seen.append(gradient.norm().item())),
        named["head.bias"].register_post_accumulate_grad_hook(unit),
    ]


def _hooked(fields: dict[str, Any], own_loop: bool) -> torch.Tensor:
    """The weights after steps of which the first two have hooks, and what one of these has seen."""
    engine = _engine(**fields)
    seen: list[float] = []
    handles = _hook(engine.model, seen)
    for step in range(3):
        if step == 2:
            for handle in handles:
                handle.remove()
        inputs, targets = own_shard(engine, *_batch(step))
        if own_loop:
            engine.backward(_loss(engine.model(inputs), targets))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        else:
            engine.step(inputs, targets)
    return torch.cat([*(p.detach().flatten() for p in engine.model.parameters()), torch.tensor(seen)])


@pytest.mark.fast_cases("fields0-step", "fields0-loop")
@pytest.mark.parametrize("own_loop", [False, True], ids=["step", "loop"])
@pytest.mark.parametrize(
    "fields", [dict(zero=0), dict(zero=1), dict(zero=2), dict(zero=3), dict(zero=3, tp=2), dict(zero=0, tp=2)]
)
def test_hooks_of_parameters_get_the_gradient_of_the_whole_batch(ranks, fields, own_loop):
    expected = ranks(1, _plainly_hooked)[0]
    for found in ranks(2 * fields.get("tp", 1), _hooked, fields, own_loop):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _plainly_hooked() -> torch.Tensor:
    model = Net()
    optimizer, seen = SGD(model.parameters()), []
    handles = _hook(model, seen)
    for step in range(3):
        if step == 2:
            for handle in handles:
                handle.remove()
        _loss(model(_batch(step)[0]), _batch(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([*(p.detach().flatten() for p in model.parameters()), torch.tensor(seen)])


def _by_activations_and_weights(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients that a loop takes itself: by its inputs, and by weights, perhaps to differentiate them again."""
    engine = _engine(**fields)
    inputs, targets = own_shard(engine, *_batch())
    inputs.requires_grad_()
    loss = _loss(engine.model(inputs), targets)
    weight = engine.model.blocks[2].weight
    found = dict(zip(("x", "weight"), torch.autograd.grad(loss, (inputs, weight), create_graph=True), strict=True))
    (found["twice"],) = torch.autograd.grad(found["weight"].square().sum(), [engine.model.inlet.bias])
    group, everyone = engine.mesh.dp_group, torch.empty(8 * 6)
    if engine.mesh.dp_size > 1:
        all_gather_into(everyone, found["x"].detach().reshape(-1) / engine.mesh.dp_size, group)
        found["x"] = everyone.view(8, 6)
    return {name: value.detach().clone() for name, value in found.items()}


@pytest.mark.parametrize("zero", range(4))
def test_gradients_that_a_loop_takes_itself(ranks, zero):
    expected = ranks(1, _by_activations_and_weights, dict(zero=0))[0]
    for found in ranks(2, _by_activations_and_weights, dict(zero=zero)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def _projected(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """PCGrad: of two tasks' gradients, one is projected on the other, which is not linear in them."""
    engine = _engine(**fields)
    parameters = list(engine.model.parameters())
    for _ in range(2):
        inputs, targets = own_shard(engine, *_batch())
        output = engine.model(inputs)
        first = torch.autograd.grad(_loss(output, targets), parameters, retain_graph=True)
        second = torch.autograd.grad(_loss(output, targets.roll(1, dims=-1)), parameters)
        overlap = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        size = sum(a.square().sum() for a in first)
        for p, a, b in zip(parameters, first, second, strict=True):
            p.grad = a + b - overlap / size * a
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return engine.full_state_dict()


@pytest.mark.parametrize("fields", [*(dict(zero=zero) for zero in range(4)), dict(zero=1, recompute="full")], ids=str)
def test_projected_gradients_are_those_of_one_process(ranks, fields):
    expected = ranks(1, _projected, dict(zero=0))[0]
    torch.testing.assert_close(ranks(2, _projected, fields)[0], expected, rtol=1e-5, atol=1e-7)


def _held_bytes(engine: ts.Engine) -> list[int]:
    """Bytes of whole parameters in memory: of each block, and of all that is in none."""
    with without_torch_functions_of_tensors():
        held = {name: p.untyped_storage().nbytes() for name, p in engine.model.named_parameters()}
    blocks = [sum(size for name, size in held.items() if name.startswith(f"blocks.{i}.")) for i in range(3)]
    return [*blocks, sum(held.values()) - sum(blocks)]


def _read_in_loops() -> dict[str, list[int]]:
    engine = _engine(zero=3)
    inputs, targets = own_shard(engine, *_batch())
    engine.step(inputs, targets)
    held = {"step": _held_bytes(engine)}
    for p in engine.model.parameters():
        assert p.norm().item() > 0 and p.requires_grad  # with a graph, which goes again
    held["read"] = _held_bytes(engine)
    loss = _loss(engine.model(inputs), targets) + sum(p.square().sum() for p in engine.model.blocks.parameters())
    held["penalty"] = _held_bytes(engine)
    engine.backward(loss)
    held["backward"] = _held_bytes(engine)
    kept = engine.model.blocks[1].weight.detach()
    engine.evaluate(inputs, targets)
    held["kept"] = _held_bytes(engine)
    assert kept.isfinite().all()
    del kept
    engine.optimizer.step()
    engine.evaluate(inputs, targets)
    held["update"] = _held_bytes(engine)
    return held


def test_what_is_read_goes_again(ranks):
    """A graph that needs the values holds them, and so does a tensor that shows them."""
    held = ranks(2, _read_in_loops)[0]
    block = 4 * (8 * 8 + 8)
    root = 4 * (6 * 8 + 8 + 8 * 4 + 4)  # padded to two equal parts
    assert held["step"] == held["backward"] == held["update"] == [0, 0, 0, 0]
    assert held["read"] == [0, 0, 0, root]  # the one that was read last
    assert held["penalty"][:3] == [block] * 3
    assert held["kept"] == [0, block, 0, 0]


def _read_by_one(what: str) -> None:
    engine = _engine(zero=3)
    engine.step(*own_shard(engine, *_batch()))
    if engine.mesh.rank == 0:
        engine.model.blocks[1].weight.norm()
    elif what == "steps":
        engine.step(*own_shard(engine, *_batch()))


@pytest.mark.slow
@pytest.mark.parametrize("what", [pytest.param("steps", marks=pytest.mark.slow), "ends"])
def test_a_weight_that_one_rank_reads_alone_is_named(ranks, what):
    with pytest.raises(RankError, match=r"rank 0 read a weight of 'blocks.1' at test_one_parameter.py:\d+, and zero=3"):
        ranks(2, _read_by_one, what, group_timeout=10)


def _by_groups_of_the_script(fields: dict[str, Any]) -> torch.Tensor:
    """The weights where the script groups the parameters of its own model, as it does for one process."""
    model = Net()

    def optimizer(_: Any) -> torch.optim.Optimizer:
        groups = [{"params": list(model.blocks.parameters()), "lr": 0.1}]
        groups.append({"params": [*model.inlet.parameters(), *model.head.parameters()]})
        return torch.optim.SGD(groups, lr=0.5)

    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=optimizer, loss_fn=_loss, device="cpu")
    for step in range(2):
        engine.step(*own_shard(engine, *_batch(step)))
    return torch.cat([p.detach().flatten() for p in engine.model.parameters()]).clone()


@pytest.mark.slow
def test_groups_may_hold_the_parameters_of_the_scripts_own_model(ranks):
    expected = ranks(1, _by_groups_of_the_script, dict(zero=0))[0]
    for fields in (*(dict(zero=zero) for zero in LEVELS), dict(tp=2)):
        for found in ranks(2, _by_groups_of_the_script, fields):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
