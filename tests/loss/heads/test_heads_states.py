"""Narrow states: stochastic rounding, bf16 and 8-bit momentum, and what they do to accuracy."""

from typing import Any

import pytest
import torch
from torch import nn

import tensorshard.distributed as tsd
from bounds import assert_within
from tensorshard.compat.state import collect_state_dict, relocate_state_dict
from tensorshard.loss import tiles
from tensorshard.loss.kernels import Noise, block_size, dequantize, quantize, round_to_bfloat16_
from tensorshard.nn import ParallelLinearCrossEntropy


def _bits(values: torch.Tensor, seed: int) -> torch.Tensor:
    return Noise(values.numel(), seed, values.device).bits(values.shape)


def test_stochastic_rounding_keeps_the_mean():
    torch.manual_seed(0)
    values = torch.randn(64, 128)
    drawn = torch.stack([round_to_bfloat16_(values.clone(), _bits(values, s)) for s in range(400)])
    assert torch.equal(drawn, drawn.bfloat16().float())
    spacing = 2.0 ** (values.abs().log2().floor() - 7)
    assert ((drawn - values).abs() < spacing).all()
    assert ((drawn.mean(0) - values).abs() < spacing * 0.15).all()  # 6 standard deviations
    for special in (torch.tensor([0.0, 1.0, torch.inf, -torch.inf]), torch.tensor([1.5, -2.0, 256.0, 0.0])):
        assert torch.equal(round_to_bfloat16_(special.clone(), _bits(special, 1)), special)


def test_eight_bits_keep_the_mean():
    torch.manual_seed(0)
    values = torch.randn(32, 256) * torch.rand(32, 256) ** 4
    values[3] = 0
    assert block_size(256) == 128 and block_size(512) == 128 and block_size(100) == 100 and block_size(131) == 131
    drawn = []
    for seed in range(400):
        codes, scales = torch.empty(32, 256, dtype=torch.int8), torch.empty(32, 2)
        quantize(values.clone(), _bits(values, seed), torch.empty_like(values), codes, scales)
        drawn.append(dequantize(codes, scales, torch.empty_like(values)))
    largest = values.view(32, 2, 128).abs().amax(-1, keepdim=True).expand(-1, -1, 128).reshape(32, 256)
    level = 2 * (values.abs() / largest.clamp(min=1e-9)).sqrt() * 127 + 1  # to the next level, in units of the smallest
    error = torch.stack(drawn) - values
    assert (error.abs() <= 1.01 * largest * level / 127**2 + 1e-9).all()
    assert (error.mean(0).abs() <= 0.16 * largest * level / 127**2 + 1e-9).all()
    assert not torch.stack(drawn)[:, 3].any()
    nothing = torch.full((1, 128), torch.nan)
    codes, scales = torch.empty(1, 128, dtype=torch.int8), torch.empty(1, 1)
    quantize(nothing.clone(), _bits(nothing, 0), torch.empty(1, 128), codes, scales)
    assert dequantize(codes, scales, torch.empty(1, 128)).isnan().all()  # not hidden


FORMATS = {
    "fp32": ({}, 8.0),
    "bf16 momentum": ({"momentum_dtype": "bf16"}, 6.0),
    "bf16": ({"momentum_dtype": "bf16", "dtype": torch.bfloat16}, 4.0),
    "int8 momentum": ({"momentum_dtype": "int8"}, 5.1),
    "int8": ({"momentum_dtype": "int8", "dtype": torch.bfloat16}, 3.1),
}


def _head(features: int, classes: int, form: str, **options: Any) -> ParallelLinearCrossEntropy:
    given = dict(FORMATS[form][0])
    dtype = given.pop("dtype", torch.float32)
    update = dict(lr=0.5, momentum=0.9, weight_decay=1e-4, **given)
    return ParallelLinearCrossEntropy(features, classes, update=update, dtype=dtype, **options)


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_per_class(form):
    """What stays from step to step, as the storages say."""
    features, classes = 512, 300
    head = _head(features, classes, form)
    head(torch.randn(4, features), torch.randint(classes, (4,))).backward()
    tensors = [head.weight, *head.optimizer.state[head.weight].values()]
    held = sum(t.untyped_storage().nbytes() for t in tensors)
    assert held == head.weight.untyped_storage().nbytes() + head.optimizer.state_bytes()
    assert held <= FORMATS[form][1] * features * classes


@pytest.mark.parametrize("form", FORMATS)
def test_micro_batches_and_states(form, monkeypatch):
    """One step in two backward passes, in or out of the context, and one whose state was saved and loaded."""
    monkeypatch.setattr(tiles, "tile_width", lambda *_: 16)
    torch.manual_seed(0)
    x, targets = torch.randn(8, 64), torch.randint(50, (8,))

    def train(how: str, steps: int = 2) -> ParallelLinearCrossEntropy:
        torch.manual_seed(1)
        head = _head(64, 50, form)
        for _ in range(steps):
            if how == "whole":
                head(x, targets).backward()
            else:
                with head.accumulate():
                    (head(x[:4], targets[:4]) / 2).backward()
                if how == "context":
                    (head(x[4:], targets[4:]) / 2).backward()
                else:
                    with head.accumulate():
                        (head(x[4:], targets[4:]) / 2).backward()
            head.optimizer.step()
        return head

    whole = train("whole")
    for how in ("context", "step"):
        got = train(how)
        error = (got.weight.float() - whole.weight.float()).norm() / (
            whole.weight - train("whole", 0).weight
        ).float().norm()
        assert_within(error, 1e-6 if form == "fp32" else 0.15, form)
    # Resumed from its state, a head does what it would have done.
    state, momentum = whole.state_dict(), whole.optimizer.state_dict()
    again = _head(64, 50, form)
    again.load_state_dict(state)
    again.optimizer.load_state_dict(momentum)
    for head in (whole, again):
        head(x, targets).backward()
        head.optimizer.step()
    assert torch.equal(again.weight, whole.weight)
    # And one of another form takes it, converted.
    other = _head(64, 50, "fp32")
    other.optimizer.load_state_dict(momentum)
    back = _head(64, 50, form)
    back.optimizer.load_state_dict(other.optimizer.state_dict())
    want = other.optimizer.state[other.weight]["momentum_buffer"]
    error = _as_fp32(back).sub(want).norm() / want.norm()
    assert want.norm() > 0
    assert_within(error, 1e-7 if form == "fp32" else 0.03, form)


def _as_fp32(head: ParallelLinearCrossEntropy) -> torch.Tensor:
    state = head.optimizer.state[head.weight]
    momentum, scales = state["momentum_buffer"], state.get("momentum_scales")
    return momentum.float() if scales is None else dequantize(momentum, scales, torch.empty(momentum.shape))


def _two_ranks(form: str) -> None:
    tsd.init_process_group(2)
    torch.manual_seed(0)
    head = _head(64, 51, form)
    x, targets = torch.randn(8, 64), torch.randint(51, (8,))
    for _ in range(3):
        head(x, targets).backward()
        head.optimizer.step()
    state = collect_state_dict(head.optimizer, rank0_only=False)
    alone = FORMATS[form][0].get("momentum_dtype", "fp32")
    assert (
        state["state"][0]["momentum_buffer"].shape == (51, 64) and state["param_groups"][0]["momentum_dtype"] == alone
    )
    for given in (state, relocate_state_dict(head.optimizer, state), head.optimizer.state_dict()):
        other = _head(64, 51, form)
        other.load_state_dict(head.state_dict())
        other.optimizer.load_state_dict(given)
        for name, value in collect_state_dict(other.optimizer, rank0_only=False)["state"][0].items():
            want = state["state"][0][name]
            assert (value.float() - want.float()).norm() <= 0.05 * want.float().norm()


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_over_ranks(ranks, form):
    ranks(2, _two_ranks, form)


def _faces(seed: int, people: int = 100, pixels: int = 64) -> tuple[torch.Tensor, ...]:
    """Made faces: smooth patterns, one a person, each picture with its own light and noise. Training and test sets."""
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.linspace(0, 3, 8)
    basis = torch.stack(
        [torch.outer(torch.cos(a * smooth), torch.cos(b * smooth)).flatten() for a in range(4) for b in range(4)]
    )
    patterns = torch.randn(people, 16, generator=generator) @ basis / 4
    sets = []
    for count in (12, 10):
        labels = torch.arange(people).repeat(count)
        light = 1 + 0.3 * torch.randn(len(labels), 1, generator=generator)
        sets += [patterns[labels] * light + 0.45 * torch.randn(len(labels), pixels, generator=generator), labels]
    return tuple(sets)


def _accuracy(form: str, seed: int, epochs: int = 8) -> float:
    """Of a small network, trained with a head of that form on the faces of `seed`, in percent."""
    images, labels, test_images, test_labels = _faces(seed)
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    head = _head(64, 100, form)
    head.optimizer.group["lr"] = 0.1
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, epochs) for o in (optimizer, head.optimizer)]
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(100):
            optimizer.zero_grad()
            head(backbone(images[batch]), labels[batch]).backward()
            optimizer.step()
            head.optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return 100 * head.accuracy(backbone(test_images), test_labels).item()


@pytest.mark.slow
def test_accuracy_is_that_of_fp32():
    seeds = range(4)
    found = {form: [_accuracy(form, seed) for seed in seeds] for form in FORMATS}
    means = {form: sum(values) / len(values) for form, values in found.items()}
    assert 60 < means["fp32"] < 99  # neither hopeless nor too easy to tell forms apart
    for mean in means.values():
        assert abs(mean - means["fp32"]) < 0.5, (means, found)
