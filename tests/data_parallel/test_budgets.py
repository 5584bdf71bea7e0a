"""What a step costs beside the model's own work, by counting and not by timing: operators, messages, and reads.

The counts are of one of eight ranks, whose others do not exist, on the path that NCCL takes.
"""

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

import tensorshard as ts
from tensorshard.data_parallel import published_weights
from tensorshard.data_parallel.buckets import DEBUG_VARIABLE
from tensorshard.engine import gradients
from tensorshard.models import GPT, next_token_loss
from tensorshard.torch_private.process_groups import fake_world

_LAYERS, _RANKS = 12, 8


@pytest.fixture(autouse=True)
def no_debugging(monkeypatch):
    """The tests' own fills of weights that have yet to arrive are no part of a step."""
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)


class _Count(TorchDispatchMode):
    """Counts collectives, and all other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counter = self.messages if func.namespace == "c10d" else self.operators
        counter[str(func)] += 1
        self.order.append(str(func))
        return func(*args, **(kwargs or {}))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(16, (2, 8), generator=generator), torch.randint(16, (2, 8), generator=generator)


def _model(width: int) -> GPT:
    return GPT(vocab_size=16, context_length=8, num_layers=_LAYERS, num_heads=2, width=width)


def _counted(step: Any) -> _Count:
    for _ in range(3):  # states are made in the first, and the order of gradients is known in the second
        step()
    with _Count() as count:
        step()
    return count


def _plain_operators() -> tuple[int, int]:
    """Operators of a step of plain PyTorch, and parameters."""
    model, (inputs, targets) = _model(32), _batch()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        total, count = next_token_loss(model(inputs), targets)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _counted(step).operators.total(), len(list(model.parameters()))


def _engine_counts(width: int, **fields: Any) -> _Count:
    return _counts_of(partial(_model, width), next_token_loss, _batch, fields)


def _counts_of(model: Any, loss_fn: Any, batch: Any, fields: dict[str, Any], backend: str = "nccl") -> _Count:
    with fake_world(0, _RANKS, backend):
        engine = ts.parallelize(model, ts.Plan(**fields), optimizer=torch.optim.AdamW, loss_fn=loss_fn, device="cpu")
        return _counted(lambda: engine.step(*batch()))


@pytest.mark.slow_cases("3-{'zero': 0}", "8-{'zero': 3}", "6-{'zero': 2}", "6-{'zero': 1}")
@pytest.mark.parametrize(
    ("budget", "fields"),
    [
        (3, dict(zero=0)),
        (6, dict(zero=1)),
        (6, dict(zero=2)),
        (8, dict(zero=1, precision="bf16", clip_grad_norm=1.0)),
        (8, dict(zero=3)),
    ],
    ids=str,
)
def test_operators_for_each_parameter(budget, fields):
    plain, parameters = _plain_operators()
    assert _engine_counts(32, **fields).operators.total() - plain <= budget * parameters


@pytest.mark.slow_cases(
    "nccl-20-{'zero': 0}",
    "nccl2-50-{'zero': 1, 'dp_replicate': 2, 'dp_shard': 4}",
    "nccl-lazy-50-{'zero': 1, 'dp_replicate': 2, 'dp_shard': 4}",
    "nccl-50-{'zero': 1, 'dp_replicate': 2, 'dp_shard': 4}",
    "nccl-lazy-40-{'zero': 1}",
    "nccl2-20-{'zero': 0}",
    "nccl2-40-{'zero': 1}",
    "nccl-lazy-20-{'zero': 0}",
)
@pytest.mark.parametrize(
    ("budget", "fields"),
    [(20, dict(zero=0)), (40, dict(zero=1)), (50, dict(zero=1, dp_replicate=2, dp_shard=4))],
    ids=str,
)
@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy"])  # torch 2.15 has three implementations
def test_messages_of_large_layers(budget, fields, backend):
    """Each layer has several weights too large to be packed; they are one call all the same."""
    messages = _counts_of(partial(_model, 128), next_token_loss, _batch, fields, backend).messages
    assert any("coalesced" in name for name in messages)
    assert messages.total() <= budget


@pytest.mark.parametrize(
    ("fields", "times", "sums"),
    [
        (dict(zero=3), 1, 0),
        (dict(zero=3, recompute="full"), 1, 0),
        (dict(zero=3, micro_batches=2), 2, 0),
        (dict(zero=3, dp_replicate=2, dp_shard=4), 1, _LAYERS),
    ],
    ids=str,
)
def test_no_unit_is_gathered_that_nobody_needs(fields, times, sums):
    """Each block for its forward and for its backward, all that is in no block once; a reduction for each."""
    messages = _engine_counts(256, **fields).messages
    gathers = sum(count for name, count in messages.items() if "gather" in name)
    scatters = sum(count for name, count in messages.items() if "scatter" in name)
    assert gathers == times * (2 * _LAYERS + 1)
    assert scatters == times * (_LAYERS + 1)
    assert messages["c10d.allreduce_coalesced_.default"] == sums


def _gathers_of_first_steps() -> list[int]:
    """How many units two real ranks gather in each of their first steps, in an evaluation, and for a read."""
    started = []
    gather = published_weights.all_gather_several
    published_weights.all_gather_several = lambda *args, **named: started.append(1) or gather(*args, **named)
    try:
        engine = ts.parallelize(
            partial(_model, 256), ts.Plan(zero=3), optimizer=torch.optim.AdamW, loss_fn=next_token_loss, device="cpu"
        )
        counts = []
        calls = [lambda: engine.step(*_batch())] * 3 + [lambda: engine.evaluate(*_batch())]
        calls.append(lambda: [p.shape for p in engine.model.parameters()])
        calls.append(lambda: sum(p.detach().sum() for p in engine.model.blocks[3].parameters()))
        for call in calls:
            started.clear()
            call()
            counts.append(len(started))
        return counts
    finally:
        published_weights.all_gather_several = gather


def test_gathers_of_the_first_steps(ranks):
    step, evaluation = 2 * _LAYERS + 1, _LAYERS + 1
    looks = 4 * evaluation  # whether samples are computed by themselves
    assert ranks(2, _gathers_of_first_steps)[0] == [step + looks, step, step, evaluation, 0, 1]


def test_backward_goes_on_between_the_two_sums_of_hybrid_sharding():
    order = _engine_counts(128, zero=1, dp_replicate=2, dp_shard=4).order
    kinds = [name for name in order if "scatter" in name or "allreduce" in name or name == "aten.mm.default"]
    scatters = [index for index, name in enumerate(kinds) if "scatter" in name]
    assert len(scatters) > 2
    for first, following in pairwise(scatters[:-1]):
        (second,) = (i for i in range(first, following) if "allreduce" in kinds[i])
        assert "aten.mm.default" in kinds[first:second], kinds


@pytest.mark.slow
def test_on_a_gpu_an_update_is_launched_before_its_check_is_read(monkeypatch):
    monkeypatch.setattr(gradients, "_reads_later", lambda _: True)
    order = _engine_counts(32, zero=1, precision="fp16").order
    (update,) = (place for place, name in enumerate(order) if name == "aten._fused_adamw_.default")
    (read,) = (place for place, name in enumerate(order) if name == "aten._local_scalar_dense.default")
    gathers = [place for place, name in enumerate(order) if "gather" in name and name.startswith("c10d")]
    assert update < read < min(gathers)  # what ranks wrote is compared before they have each other's weights


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("full", 2)])
def test_messages_of_routed_experts(recompute, forwards):
    """Of a layer: how many rows, the rows with their experts and weights, and back. Backward sends two more."""

    def build() -> nn.Module:
        config = MixtralConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            num_local_experts=8, vocab_size=16,
        )  # fmt: skip
        return MixtralForCausalLM(config)

    inputs = dict(zip(("input_ids", "labels"), _batch(), strict=True))
    count = _counts_of(build, ts.model_loss, lambda: (inputs, None), dict(ep=8, zero=0, recompute=recompute))
    messages = sum(number for name, number in count.messages.items() if "alltoall" in name)
    assert messages == 2 * (3 * forwards + 2), count.messages


def _blocks(between: Any) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(256, 512), between(512), nn.Linear(512, 256)) for _ in range(_LAYERS)]
    return nn.Sequential(*blocks, nn.Linear(256, 4))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


class _Own(nn.Module):
    """An autograd function of the user's, in which another backward could run."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Doubled.apply(x)


@pytest.mark.slow_cases(
    "<class 'torch.nn.modules.batchnorm.BatchNorm1d'>-allreduce_coalesced-{'zero': 0}",
    "<class 'torch.nn.modules.batchnorm.BatchNorm1d'>-scatter-{'zero': 1, 'dp_replicate': 2}",
    "<class 'torch.nn.modules.batchnorm.BatchNorm1d'>-scatter-{'zero': 1, 'micro_batches': 2}",
)
@pytest.mark.parametrize(
    ("between", "reduction", "fields"),
    [
        (nn.BatchNorm1d, "allreduce_coalesced", dict(zero=0)),
        (nn.BatchNorm1d, "scatter", dict(zero=2)),
        (nn.BatchNorm1d, "scatter", dict(zero=1, dp_replicate=2)),
        (nn.BatchNorm1d, "scatter", dict(zero=1, micro_batches=2)),
        (_Own, "scatter", dict(zero=1, micro_batches=2)),
    ],
    ids=str,
)
def test_no_reduction_is_held_back(between, reduction, fields):
    """Each block's gradients are on their way before the backward of the next one begins."""
    batch = (torch.randn(4, 256), torch.arange(4))
    order = _counts_of(partial(_blocks, between), nn.functional.cross_entropy, lambda: batch, fields).order
    kinds = [name for name in order if reduction in name or name == "aten.mm.default"]
    reductions = [index for index, name in enumerate(kinds) if reduction in name]
    assert len(reductions) >= _LAYERS
    gaps = [following - first - 1 for first, following in pairwise(reductions)]
    assert gaps == [4] * (len(gaps) - 1) + gaps[-1:], kinds  # two products for each linear layer's backward
