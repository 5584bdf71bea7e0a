"""Stages compute what the model does where it calls other units than in the run that it was cut by."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_stages import compare, run_stages, stages_of
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import seeds
from pipeline_models import Example
from tensorshard.engine.pipeline_step import _can_join, _joined
from tensorshard.pipeline.trace.tracer import Tracer
from tensorshard.torch_private.dispatch import TorchDispatchMode


class Steps(nn.Module):
    """A cell that is called for each time step."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.cell, self.head = nn.Linear(3, 4), nn.GRUCell(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        state = x.new_zeros(len(x), 4)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state)


class Auxiliary(nn.Module):
    """An auxiliary head that training alone calls, as GoogLeNet's; `thaws`: a block that evaluation alone calls."""

    def __init__(self, thaws: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4))
        self.aux, self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)
        self.thaws = thaws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra: torch.Tensor | float = 0.0
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.training != self.thaws:
                extra = self.aux(x)
        return self.head(x) + extra


def _pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    seeds.seed(3)
    whole = build()
    shared = build()
    shared.load_state_dict(whole.state_dict())
    return whole, shared


def test_a_loop_over_time_of_another_length():
    example = Example(Steps, lambda *_: None)
    whole, shared = _pair(Steps)
    stages = stages_of(shared, torch.randn(2, 4, 3), 2)
    for length in (9, 2, 4):
        compare(example, whole, stages, torch.randn(2, length, 3))
    inputs = torch.randn(2, 9, 3)
    sent = {stage.crossing_specs(inputs, stage.cut_for(inputs))[1] for stage in stages}
    assert len(sent) == 2  # they are cut, too


@pytest.mark.parametrize("thaws", [False, True])
def test_evaluation_calls_other_units_than_training(thaws):
    example = Example(lambda: Auxiliary(thaws), lambda *_: None)
    whole, shared = _pair(example.build)
    inputs = torch.randn(5, 4)
    stages = stages_of(shared, inputs, 2)
    compare(example, whole, stages, inputs)
    for module in (whole, *(stage.module for stage in stages)):
        module.eval()
    compare(example, whole, stages, inputs)
    held = [name for stage in stages for name in stage.owned_buffers()]
    assert sorted(held) == sorted(name for name, _ in whole.named_buffers())


def test_another_order_of_the_units_is_refused():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks if len(x) > 2 else reversed(self.blocks):
                x = block(x)
            return x

    stages = stages_of(Backwards(), torch.randn(4, 4), 2)
    with pytest.raises(ValueError, match=r"cannot compute them in this order: name a module .*pp_units"):
        run_stages(stages, torch.randn(2, 4), Example(Backwards, lambda *_: None))


class Rescaled(nn.Module):
    """Code between the blocks halves their weights for evaluation, as RWKV's does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if not self.training:
                with torch.no_grad():
                    block[0].weight.div_(2)
            x = block(x)
        return x


def test_weights_that_code_between_units_changes():
    whole, shared = _pair(Rescaled)
    inputs = torch.randn(5, 4)
    stages = stages_of(shared, inputs, 2)
    for module in (whole, *(stage.module for stage in stages)):
        module.eval()
    for _ in range(2):
        expected = whole(inputs)
        assert torch.equal(stages[1](inputs, [t.detach() for t in stages[0](inputs)]), expected)
    for stage in stages:
        for removed in stage._removed:  # what is another stage's takes no memory again
            assert getattr(removed.owner, removed.name).plain.untyped_storage().nbytes() == 4


def test_outputs_of_micro_batches_are_joined_where_they_are_samples():
    parts = [{"logits": torch.ones(2, 3)}, {"logits": torch.zeros(1, 3)}]
    assert _can_join(parts, [2, 1]) and _joined(parts)["logits"].shape == (3, 3)
    assert not _can_join(parts, [2, 2]) and not _can_join([torch.ones(()), torch.ones(())], [1, 1])
    assert _can_join([torch.ones(())], [4])


class NormAct(nn.BatchNorm1d):
    """A normalization with modules in it, as timm's."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.ones(4)), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x * self.scale)


@pytest.mark.parametrize(
    ("layers", "units"),
    [
        (lambda: [nn.Linear(4, 4), NormAct(4), Scale(), nn.Flatten(), nn.Linear(4, 4)], ["0", "1", "2", "4"]),
        (lambda: [weight_norm(nn.Linear(4, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 4))], ["0", "1", "2"]),
        (lambda: [spectral_norm(nn.Linear(4, 4)), nn.Tanh(), spectral_norm(nn.Linear(4, 4))], ["0", "1", "2"]),
    ],
    ids=["norm with modules", "weight norm", "spectral norm"],
)
def test_a_module_whose_parts_hold_no_parameters_is_one_unit(layers: Any, units: list[str]):
    example = Example(lambda: nn.Sequential(*layers()), lambda *_: None)
    whole, shared = _pair(example.build)
    inputs = torch.randn(5, 4)
    assert list(Tracer(shared).unit_names) == units
    compare(example, whole, stages_of(shared, inputs, 2), inputs)


class Images(nn.Module):
    """A network for images with activations (one of them in place, and called again), pooling and upsampling between
    its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.relu = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.middle, self.up = nn.Conv2d(4, 4, 3, padding=1), nn.Upsample(scale_factor=2)
        self.last, self.shuffle, self.average = nn.Conv2d(4, 8, 3), nn.PixelShuffle(2), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.stem(x)))
        pooled, indices = self.pool(x)
        pooled = self.relu(self.middle(pooled))
        x = self.last(x + self.unpool(pooled, indices) + self.up(pooled))
        return self.head(self.average(self.shuffle(x)).flatten(1))


class Named(TorchDispatchMode):
    """Counts calls of operators by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [2, 4, 7])
def test_one_stage_alone_computes_an_activation_or_a_pooling(count: int):
    example = Example(Images, lambda *_: None)
    whole, shared = _pair(Images)
    stages = stages_of(shared, torch.randn(2, 1, 8, 8), count)
    inputs = torch.randn(3, 1, 8, 8)
    compare(example, whole, stages, inputs)
    once = ("relu_", "max_pool2d_with_indices", "max_unpool2d", "upsample_nearest2d", "pixel_shuffle", "mean")
    with Named() as alone, torch.no_grad():
        whole(inputs)
    with Named() as staged, torch.no_grad():
        received: tuple[torch.Tensor, ...] = ()
        for stage in stages:
            received = stage(inputs, received)
    assert [staged.counts[name] for name in once] == [alone.counts[name] for name in once] == [2, 1, 1, 1, 1, 1]
