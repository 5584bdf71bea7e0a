"""Convolutions are timed when they are met, and their times kept."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.predict import convolution_times
from tensorshard.predict.convolution_times import ConvolutionCall, ConvolutionTimes, convolution_call
from tensorshard.predict.hardware import (
    THIS_MACHINE,
    Hardware,
    Link,
    Rates,
    find_hardware,
    save_measured,
)
from tensorshard.predict.operation_ledger import OperationLedger
from tensorshard.predict.operations import FORWARD, Kernel
from tensorshard.predict.step_time import kernel_time
from tensorshard.torch_private.fake_tensors import FakeTensorMode

LINK = Link(1e9, 1e-4)
RATES = Rates(
    {"float32": 1e10}, 1e10, (1.0, 1.0), (1.0, 1.0), launch=0.0, asynchronous=False, devices_per_node=8,
    within_node=LINK, between_nodes=LINK, host_bandwidth=1e10, memory_beside=True,
    operators={"aten.convolution": ((1e-3, 2e-3),)},
)  # fmt: skip


def calls_of(model: nn.Module, inputs: torch.Tensor) -> set[ConvolutionCall]:
    """The convolutions of forward and backward."""
    with OperationLedger() as ledger:
        ledger.begin_step(lambda: FORWARD)
        model(inputs).sum().backward()
        ledger.end_step()
    return {kernel.convolution for kernel in ledger._counts.kernels if kernel.convolution is not None}


class Strided(nn.Module):
    """Convolutions with all kinds of arguments: strides, groups, dilation, a bias or none, transposed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 8, 3, groups=4, dilation=2, padding=2, bias=False),
            nn.ConvTranspose2d(8, 4, 2, stride=2, output_padding=1),
        )
        self.line = nn.Conv1d(4, 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(self.layers(x).flatten(2))


def test_calls_are_the_same_on_fake_tensors_and_can_be_made():
    real = calls_of(Strided(), torch.ones(6, 4, 12, 12, requires_grad=True))
    with FakeTensorMode():
        fake = calls_of(Strided(), torch.empty(6, 4, 12, 12, requires_grad=True))
    assert fake == real
    assert len(real) == 8  # four layers, forward and backward
    times = ConvolutionTimes()
    for call in real:
        assert call.samples == 6
        assert times.seconds(call, 1e-6) > 0
        assert times.seconds(call.with_samples(2), 1e-6) > 0


def one_call(samples: int = 8) -> ConvolutionCall:
    x, weight = torch.empty(samples, 4, 8, 8), torch.empty(4, 4, 3, 3)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    call = convolution_call(torch.ops.aten.convolution.default, args, {})
    assert call is not None
    return call


def test_times_are_kept_and_long_calls_made_with_fewer_samples(tmp_path, monkeypatch):
    made: list[int] = []

    def timed(call: ConvolutionCall) -> float:
        made.append(call.samples)
        return 1e-3 * call.samples

    monkeypatch.setattr(convolution_times, "_timed", timed)
    path = tmp_path / "times.json"
    times = ConvolutionTimes(path)
    assert times.seconds(one_call(), 1e-3) == pytest.approx(8e-3)
    assert times.seconds(one_call(), 40e-3) == pytest.approx(8e-3)  # by two samples, which take 10 ms
    assert made == [8, 2]
    assert ConvolutionTimes(path).seconds(one_call(), 1e-3) == pytest.approx(8e-3)  # another process
    assert made == [8, 2]
    path.write_text("not json")
    assert ConvolutionTimes(path).seconds(one_call(), 1e-3) == pytest.approx(8e-3)
    assert made == [8, 2, 8] and len(json.loads(path.read_text())) == 1
    assert ConvolutionTimes(tmp_path / "gone" / "times.json").seconds(one_call(), 1e-3) == pytest.approx(8e-3)


def test_a_convolution_takes_what_was_measured_and_others_what_their_curve_says(monkeypatch):
    monkeypatch.setattr(convolution_times, "_timed", lambda call: 5.0)
    kernel = Kernel(FORWARD, "aten.convolution", "float32", 10**7, 0, one_call())
    assert kernel_time(kernel, RATES) == pytest.approx(2e-3)
    rates = replace(RATES, convolutions=ConvolutionTimes())
    assert kernel_time(kernel, rates) == pytest.approx(5.0)
    assert kernel_time(replace(kernel, convolution=None), rates) == pytest.approx(2e-3)


def test_threads_and_random_state_are_left_alone():
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    ConvolutionTimes().seconds(one_call(), 1e-6)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_what_is_not_timed():
    x, weight = (torch.empty(size, dtype=torch.complex64) for size in ((2, 4, 8, 8), (4, 4, 3, 3)))
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert convolution_call(torch.ops.aten.convolution.default, args, {}) is None
    assert convolution_call(torch.ops.aten.mm.default, (weight, weight), {}) is None


def test_only_the_profile_of_this_machine_times_convolutions(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORSHARD_CACHE", str(tmp_path))
    save_measured(1 << 30, 0, RATES, "test")
    measured = find_hardware(THIS_MACHINE)
    assert measured is not None and measured.rates is not None and measured.rates.convolutions is not None
    assert find_hardware("h100").rates.convolutions is None
    found = ts.estimate(
        partial(nn.Conv2d, 4, 4, 3),
        ts.Plan(),
        world_size=1,
        inputs=torch.empty(2, 4, 8, 8),
        targets=torch.empty(2, 4, 6, 6),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=nn.functional.mse_loss,
        hardware=measured,
    )
    assert found.step_time.seconds > 0
    kept = list(tmp_path.glob("*convolutions.json"))
    assert len(kept) == 1 and json.loads(kept[0].read_text())
    save_measured(1 << 30, 0, measured.rates, "measured anew")
    assert not list(tmp_path.glob("*convolutions.json"))
    assert Hardware("other", 1 << 30, 0, RATES).rates.convolutions is None
