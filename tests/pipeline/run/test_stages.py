"""Stages run one after the other compute what the whole model does, to the last bit."""

import copy
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline_models import EXAMPLES, Example
from tensorshard.model.batches import call_model
from tensorshard.model.blocks import find_blocks
from tensorshard.model.tensors import tensor_leaves
from tensorshard.passes.recompute import apply_recompute
from tensorshard.pipeline.cut import cut_model
from tensorshard.pipeline.run.cut_cache import CutCache
from tensorshard.pipeline.run.stage_module import StageModule
from tensorshard.pipeline.run.stage_skeleton import AbsentTensor
from tensorshard.pipeline.trace.tracer import Tracer


def stages_of(model: nn.Module, inputs: Any, count: int, **options: Any) -> list[StageModule]:
    tracer = Tracer(model)
    cut = cut_model(tracer.trace(inputs), count, **options)
    shapes = CutCache(tracer, cut)
    return [StageModule(model, shapes, index) for index in range(count)]


def run_stages(stages: list[StageModule], inputs: Any, example: Example, context: Any = nullcontext) -> Any:
    """The output of the last stage, after a backward through all."""
    received: list[tuple[torch.Tensor, ...]] = [()]
    sent: list[tuple[torch.Tensor, ...]] = []
    output: Any = None
    for stage in stages:
        with context():
            layouts, expected = stage.crossing_specs(inputs, stage.cut_for(inputs))
            assert len(layouts) == len(received[-1])
            for layout, tensor in zip(layouts, received[-1], strict=True):
                assert layout.fits(tensor) and layout.requires_grad == tensor.requires_grad
            output = stage(inputs, received[-1])
            if stage.is_last:
                break
        assert [(tuple(t.shape), t.dtype, t.requires_grad) for t in output] == [
            (layout.shape, layout.dtype, layout.requires_grad) for layout in expected
        ]
        sent.append(output)
        received.append(tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in output))
    example.loss(output).backward()
    for into, out in zip(reversed(received[1:]), reversed(sent), strict=True):
        pairs = [(t, leaf.grad) for t, leaf in zip(out, into, strict=True) if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    return output


def compare(example: Example, whole: nn.Module, stages: list[StageModule], inputs: Any, context: Any = nullcontext):
    """Output and gradients of `stages`, which share the tensors of another copy of `whole`, are its own bit for bit."""
    whole.zero_grad()
    for stage in stages:
        stage.module.zero_grad()
    torch.manual_seed(11)
    with context():
        expected = call_model(whole, inputs)
    example.loss(expected).backward()
    torch.manual_seed(11)
    found = run_stages(stages, inputs, example, context)
    assert type(found) is type(expected)
    for one, other in zip(tensor_leaves(found), tensor_leaves(expected), strict=True):
        assert torch.equal(one, other)
    held = [dict(stage.module.named_parameters()) for stage in stages]
    for name, parameter in whole.named_parameters():
        holding = [mine[name] for mine in held if name in mine]
        assert holding and all(p is holding[0] for p in holding)  # a shared one is one object in one process
        gradient = holding[0].grad
        if parameter.grad is None:
            assert gradient is None, name
            continue
        assert gradient is not None, name
        several = len(holding) > 1  # its parts may be added in another order
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5 if several else 0, atol=1e-6 if several else 0)
    for name, buffer in whole.named_buffers():
        mine = next(b for stage in stages for n, b in stage.module.named_buffers() if n == name)
        assert torch.equal(mine, buffer), name


@pytest.mark.slow_cases("3", "t5", "gpt2-2", "resnet-2", "bert-2")
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", EXAMPLES)
def test_stages_are_exact(kind, count):
    example = EXAMPLES[kind]
    model, inputs = example.make()
    model.train()
    stages = stages_of(model, inputs, count)
    whole = copy.deepcopy(model)
    compare(example, whole, stages, inputs)
    # Other numbers of samples, and other lengths, than those of the samples that the model was cut with.
    compare(example, whole, stages, example.make(samples=3)[1])
    compare(example, whole, stages, example.make(samples=3, size=5)[1])


@pytest.mark.parametrize("kind", ["gpt_dropout", pytest.param("t5", marks=pytest.mark.slow), "unet", "vit"])
def test_stages_are_exact_under_autocast(kind):
    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    example = EXAMPLES[kind]
    model, inputs = example.make()
    stages = stages_of(model, inputs, 3)
    compare(example, copy.deepcopy(model), stages, inputs, autocast)


@pytest.mark.slow_cases("llama-full")
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("kind", ["gpt_dropout", "llama"])
def test_stages_are_exact_with_recomputed_blocks(kind, mode):
    example = EXAMPLES[kind]
    model, inputs = example.make()
    if kind == "llama":
        model.config.use_cache = False  # a cache does not stand a second run of a layer, with or without a pipeline
    stages = stages_of(model, inputs, 3)
    whole = copy.deepcopy(model)
    for stage in stages:
        apply_recompute(stage.blocks.values(), mode)
    assert sum(len(stage.blocks) for stage in stages) == len(find_blocks(model))
    compare(example, whole, stages, inputs)


def test_a_model_on_the_meta_device_is_cut_without_memory():
    example = EXAMPLES["llama"]
    with torch.device("meta"):
        model = example.build()
    tracer = Tracer(model)
    graph = tracer.trace({"input_ids": torch.zeros(2, 8, dtype=torch.long)})
    cut = cut_model(graph, 3)
    stages = [StageModule(model, CutCache(tracer, cut), index) for index in range(3)]
    names = [name for stage in stages for name, _ in stage.module.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all(p.is_meta for stage in stages for p in stage.module.parameters())


def test_stubs_have_no_parameters_and_names_stay():
    example = EXAMPLES["gpt_tied"]
    model, inputs = example.make()
    first, second = stages_of(model, inputs, 2, split=["blocks.2"])
    assert set(second.units) == {"blocks.2", "norm", "head"} and set(second.blocks) == {"blocks.2"}
    assert not any(
        name.startswith(("blocks.0", "blocks.1", "positions")) for name, _ in second.module.named_parameters()
    )
    assert not any(name.startswith("blocks.0") for name in second.module.state_dict())
    assert first.cut.shared == {"embedding.weight": (0, 1)}
    held = {name for stage in (first, second) for name, _ in stage.module.named_parameters()}
    assert held == {name for name, _ in model.named_parameters()}
    states = [stage.module.state_dict() for stage in (first, second)]
    assert set().union(*states) == set(model.state_dict())


def test_unused_and_bare_parameters_are_held_once_or_where_they_are_used():
    model, inputs = EXAMPLES["bare"].make()
    stages = stages_of(model, inputs, 3)
    assert stages[0].cut.shared == {"scale": (0, 1, 2)}
    assert sum("unused" in dict(stage.module.named_parameters()) for stage in stages) == 1
    assert [("shift" in dict(stage.module.named_parameters())) for stage in stages] == [True, False, False]


def test_buffers_are_saved_once():
    model, inputs = EXAMPLES["unet"].make()
    stages = stages_of(model, inputs, 3)
    owned = [name for stage in stages for name in stage.owned_buffers()]
    assert sorted(owned) == sorted(name for name, _ in model.named_buffers())


def test_a_stage_that_only_passes_on_relays():
    model, inputs = EXAMPLES["unet"].make()
    stages = stages_of(model, inputs, 3, split=["down.2", "up.1"])
    first, second = stages[1].cut.received(1), stages[1].cut.received(2)
    assert (0, 0) in first and (0, 0) in second  # the first skip is used by the last stage alone
    compare(EXAMPLES["unet"], copy.deepcopy(model), stages, inputs)


def test_what_is_received_is_checked():
    model, inputs = EXAMPLES["gpt"].make()
    stages = stages_of(model, inputs, 2)
    with pytest.raises(ValueError, match="stage 1 received 0 tensors; it needs 1"):
        stages[1](inputs, ())
    with pytest.raises(ValueError, match=r"received torch.float32 \[2, 7, 32\] .* float32 \[2, 8, 32\]"):
        stages[1](inputs, (torch.zeros(2, 7, 32),))
    with pytest.raises(RuntimeError, match="call the stage"):
        stages[1].module(inputs)


class ByValue(nn.Module):
    """Whether its second half is called depends on the input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if x[0, 0] > 0 else self.layers[:2]:
            x = layer(x)
        return x


def test_calls_that_depend_on_values_are_refused_when_they_differ():
    positive = torch.ones(2, 6)
    stages = stages_of(ByValue(), positive, 2)
    sent = stages[0](positive)
    with pytest.raises(RuntimeError, match=r"returned before it called 'layers\.2'.*as one unit"):
        stages[1](-positive, sent)


class ByShape(ByValue):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: x.shape[0]]:
            x = layer(x)
        return x


def test_calls_that_depend_on_shapes_are_refused_when_they_differ():
    stages = stages_of(ByShape(), torch.ones(4, 6), 2)
    stages[0](torch.ones(5, 6))
    with pytest.raises(ValueError, match=r"of shapes \[2, 6\] the model calls other units.*call \d is of"):
        stages[0](torch.ones(2, 6))


class CatchesEverything(ByValue):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with suppress(BaseException):
                x = layer(x)
        return x


def test_a_model_that_catches_everything_is_told_so():
    x = torch.ones(2, 6)
    stages = stages_of(CatchesEverything(), x, 2)
    with pytest.raises(RuntimeError, match="although its forward was left: it catches every exception, by a bare"):
        stages[0](x)


class RegionOfTwo(nn.Module):
    """Recomputes two blocks together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 2):
            x = checkpoint(lambda x, i=index: self.layers[i + 1](self.layers[i](x)), x, use_reentrant=False)
        return x


def test_a_recomputed_region_that_was_cut_is_named():
    x = torch.ones(2, 6)
    stages = stages_of(RegionOfTwo(), x, 2, split=["layers.3"])
    (sent,) = stages[0](x)
    output = stages[1](x, (sent.detach().requires_grad_(),))
    with pytest.raises(RuntimeError, match=r"'layers\.2'.*called in backward.*Checkpoint each block"):
        output.sum().backward()


def test_code_between_units_may_write_to_what_another_stage_has():
    absent = AbsentTensor.make(torch.zeros(()).expand(2, 3), computes=lambda: True, sentence=lambda: "elsewhere")
    assert absent.mul_(2) is absent  # the stage that has it does so, too
    absent[0] = 1.0
    assert torch.equal(absent + 1, torch.ones(2, 3))
