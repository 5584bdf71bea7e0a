"""Updates of states on another tier: the optimizer's own, to the last bit."""

import copy
import errno
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorshard import Offload
from tensorshard.offload.offloaded_optimizer import OffloadedOptimizer
from tensorshard.offload.tiered_storage import probe_states
from tensorshard.offload.tiers import Tiers
from tensorshard.offload.updates import tile_update

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adam": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),  # no kernel of it is known
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),  # its states have other shapes than the parameters
}
# A matrix of several tiles whose end is no multiple of a vector, small ones that share a buffer, and a number.
SHAPES = {"matrix": (301, 203), "bias": (7,), "small": (3, 5), "number": ()}


def _parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def _offloaded(optimizer, build, parameters, tier, folder) -> tuple[OffloadedOptimizer, Tiers]:
    tiers = Tiers(Offload(optimizer=tier, path=str(folder), buffer_memory="1MiB"))
    states = {} if tile_update(optimizer) else probe_states(lambda given: build(given.values()), parameters)
    return OffloadedOptimizer(optimizer, parameters, states, tiers, offloaded={}, agree=_agree), tiers


def _agree(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    torch.manual_seed(step + 1)
    for name, parameter in parameters.items():
        gradient = torch.randn_like(parameter)
        parameter.grad = None if name == "small" and step == 0 else gradient  # its states begin later


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_update_is_the_optimizers_own(kind, tier, tmp_path):
    build = OPTIMIZERS[kind]
    expected, found = _parameters(), _parameters()
    plain, optimizer = build(expected.values()), build(found.values())
    offloaded, _ = _offloaded(optimizer, build, found, tier, tmp_path)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (plain, optimizer)]
    factor = torch.tensor(0.37, dtype=torch.float64)
    for step in range(3):
        _set_gradients(expected, step)
        for parameter in expected.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.float())
        plain.step()
        _set_gradients(found, step)
        offloaded.step(found.values(), factor)
        for schedule in schedules:
            schedule.step()
    for name in SHAPES:
        assert torch.equal(found[name], expected[name]), name
        states = optimizer.state.get(found[name], {})
        assert list(states) == list(plain.state.get(expected[name], {}))
        for key, value in plain.state.get(expected[name], {}).items():
            assert torch.equal(states[key], value), (name, key)


def test_states_that_are_loaded_go_to_the_disk_and_can_be_changed_there(tmp_path):
    build = OPTIMIZERS["adamw"]
    expected, found = _parameters(), _parameters()
    plain, optimizer = build(expected.values()), build(found.values())
    _set_gradients(expected, 1)
    plain.step()
    _offloaded(optimizer, build, found, "disk", tmp_path)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    for name in SHAPES:
        with torch.no_grad():
            found[name].copy_(expected[name])
        plain.state[expected[name]]["exp_avg"].mul_(2)
        optimizer.state[found[name]]["exp_avg"].mul_(2)
    for step in (2, 3):
        for parameters, each in ((expected, plain), (found, optimizer)):
            _set_gradients(parameters, step)
            each.step()
    for name in SHAPES:
        assert torch.equal(found[name], expected[name]), name
    saved = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    assert torch.equal(saved, plain.state[expected["matrix"]]["exp_avg_sq"])


def test_the_disk_is_read_and_written_directly_and_little_more_than_needed(tmp_path):
    found = {"matrix": nn.Parameter(torch.randn(1000, 500))}
    optimizer = torch.optim.AdamW(found.values(), fused=True)
    _offloaded(optimizer, None, found, "disk", tmp_path)
    moved = []
    for _ in range(3):
        found["matrix"].grad = torch.ones(1000, 500)
        before = _bytes()
        optimizer.step()
        moved.append([after - old for after, old in zip(_bytes(), before, strict=True)])
    needed = 2 * 4 * 500_000  # two states, fp32
    assert moved[0][0] < 0.05 * needed  # states that begin are not read
    for read, written in moved[1:]:
        assert needed <= read <= 1.05 * needed
        assert needed <= written <= 1.05 * needed


def _bytes() -> list[int]:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [int(fields["read_bytes"]), int(fields["write_bytes"])]


class Coupled(torch.optim.Optimizer):
    """Divides each gradient by the norm of all."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Coupled, r"Coupled couples parameters: 'matrix' becomes another when it is updated alone; use .*offload=None"),
        (torch.optim.LBFGS, r"LBFGS couples parameters: its step fails on small tensors .*closure"),
    ],
)
def test_an_optimizer_that_couples_parameters_is_refused_by_name(build, message):
    with pytest.raises(ValueError, match=message):
        probe_states(lambda given: build(given.values()), _parameters())


def test_options_that_need_other_states_than_were_reserved_are_refused(tmp_path):
    found = {"bias": nn.Parameter(torch.ones(7))}
    optimizer = torch.optim.SGD(found.values(), lr=0.1)
    _offloaded(optimizer, None, found, "disk", tmp_path)
    optimizer.param_groups[0]["momentum"] = 0.9
    found["bias"].grad = torch.ones(7)
    with pytest.raises(ValueError, match=r"SGD now ask for the states \['momentum_buffer'\] of 'bias', and space was"):
        optimizer.step()
    assert torch.equal(found["bias"], torch.ones(7))


def test_a_disk_that_fails_during_a_step_is_named(tmp_path, monkeypatch):
    found = {"matrix": nn.Parameter(torch.randn(1000, 500))}
    optimizer = torch.optim.AdamW(found.values(), fused=True)
    _offloaded(optimizer, None, found, "disk", tmp_path)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    found["matrix"].grad = torch.ones(1000, 500)
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(
        OSError, match=rf"scratch file in '{tmp_path}' could not be written at byte .*Input/output error"
    ):
        optimizer.step()
