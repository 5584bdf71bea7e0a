"""Reshapes that take their sizes from an input with all features."""

from functools import partial
from typing import Any

import pytest
import torch

import parity
import tensorshard as ts
from taught_models import ATTENTIONS, TaughtGPT
from tensorshard.tensor_parallel.apply.local_shapes import local_parts, local_sizes
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from toys import plain_loop

ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-4)


@pytest.mark.parametrize(
    ("shape", "wanted", "ranks", "expected"),
    [
        ((2, 8, 16), (2, 8, 4, 8), 2, [2, 8, 2, 8]),  # features to heads
        ((2, 8, 2, 8), (2, 8, 32), 2, [2, 8, 16]),  # heads to features
        ((2, 8, 16), (16, 32), 2, [16, 16]),  # samples and tokens in one
        ((2, 8, 16), (2, 8, 16, 2), 2, [2, 8, 8, 2]),  # as many heads as a rank has features
        ((2, 8, 24), (2, 8, 3, 4, 4), 2, [2, 8, 3, 2, 4]),  # queries, keys and values
        ((2, 8, 16), (2, 8, 2, 8), 2, [2, 8, 2, 8]),  # it fits
        ((2, 8, 16), (2, 8, -1, 8), 2, [2, 8, -1, 8]),  # it fits whatever there is
        ((2, 8, 16), (2, 8, 3, 8), 2, [2, 8, 3, 8]),  # a mistake stays one
        ((2, 9, 16), (2, 9, 64), 4, [2, 9, 16]),
        ((4, 12, 8), (4, 12, 4, 8), 4, [4, 12, 1, 8]),  # as many heads as ranks
        ((4, 4, 8), (16, 32), 4, [16, 8]),  # as many tokens as ranks
        ((0, 16), (0, 32), 2, [0, 32]),
    ],
)
def test_sizes(shape, wanted, ranks, expected):
    assert local_sizes(shape, wanted, ranks) == expected


@pytest.mark.parametrize(
    ("extent", "parts", "expected"),
    [(48, 32, 16), (48, 16, 16), (48, [32, 32, 32], [16, 16, 16]), (48, [40, 4, 4], [40, 4, 4]), (10, 6, 6)],
)
def test_parts(extent, parts, expected):
    assert local_parts(extent, parts, 2) == expected


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_as_it_is_taught_is_found(attention):
    found = find_tensor_plan(TaughtGPT(attention), 2)
    assert found.plan.to_dict()["transformer.h.*.attn"] == "divide(reshape.sizes)"
    assert found.split_share > 0.95


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 61, (4, 13), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _train(attention: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = ts.parallelize(TaughtGPT(attention), ts.Plan(**fields), optimizer=ADAMW, loss_fn=_loss)
    mesh = engine.mesh
    losses = []
    for step in range(4):
        losses.append(engine.step(*(t.chunk(mesh.dp_size)[mesh.dp_rank] for t in _batch(step))).item())
    return losses, engine.full_state_dict()


CASES = [
    ("fused", 2, dict(tp=2)),
    ("fused, split by the input's width", 2, dict(tp=2, recompute="full")),
    ("separate", 2, dict(tp=2, sequence_parallel=True)),
    ("packed heads", 4, dict(tp=2, zero=3)),
    ("fused, plain", 4, dict(tp=4, recompute="selective")),
    ("separate", 4, dict(tp=2, pp=2, micro_batches=2)),
]


@pytest.mark.slow_cases(
    "packed heads-4-{'tp': 2, 'zero': 3}",
    "fused, plain-4-{'tp': 4, 'recompute': 'selective'}",
    "separate-4-{'tp': 2, 'pp': 2, 'micro_batches': 2}",
)
@pytest.mark.parametrize(("attention", "size", "fields"), CASES, ids=str)
def test_it_trains_as_one_process_does(ranks, attention, size, fields):
    model = TaughtGPT(attention)
    steps = [[_batch(step)] for step in range(4)]
    expected = list(plain_loop(model, ADAMW(model.parameters()), steps, loss_fn=_loss))
    results = ranks(size, _train, attention, fields)
    for losses, _ in results:
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    parity.assert_same_state(results[0][1], model.state_dict(), 1e-5)
