"""Losses that couple samples: noticed where they are not gathered, exact where they are."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parity
import tensorshard as ts
from log_lines import logged
from tensorshard.models import GPT, next_token_loss
from toys import squares

_PATH = Path(__file__).parents[3] / "examples" / "contrastive.py"
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("contrastive", _PATH)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def _debug_lines(engine: ts.Engine, batch: tuple[Any, Any], steps: int = 2) -> list[str]:
    with logged() as lines:
        for _ in range(steps):
            engine.step(*batch)
    return [line for line in lines if line.startswith("debug: ")]


def _contrastive(fields: dict[str, Any], gathered: bool) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    example = _example()
    torch.manual_seed(3)
    loss_fn = example.contrastive_loss if gathered else lambda output, _: example.loss_of_pairs(output)
    engine = ts.parallelize(example.TwoTowers(16), ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_fn, debug=True)
    mesh = engine.mesh

    def batch(step: int) -> tuple[Any, Any]:
        images, texts = (part.chunk(mesh.dp_size)[mesh.dp_rank] for part in example.pairs(step, 16))
        return (images, texts), texts

    said = _debug_lines(engine, batch(0))
    losses = [engine.step(*batch(step)).item() for step in range(1, 8)]
    return losses, engine.full_state_dict(), said


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(dict(zero=0), marks=pytest.mark.slow),
        dict(zero=3),
        dict(zero=1, recompute="full"),
        pytest.param(dict(pp=2, pp_schedule="gpipe"), marks=pytest.mark.slow),
        pytest.param(dict(tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_gathered_contrastive_loss_is_that_of_one_process(ranks, size, fields):
    [(expected, state, said)] = ranks(1, _contrastive, dict(zero=0), True)
    assert said == []
    results = ranks(size, _contrastive, fields, True)
    for losses, _, said in results:
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        assert said == []
    parity.assert_same_state(results[0][1], state, 1e-5)


@pytest.mark.parametrize(
    ("size", "fields", "ways"),
    [
        (2, dict(zero=1), "the 2 data ranks and 1 micro-batches"),
        (1, dict(micro_batches=4), "the 1 data ranks and 4 micro-batches"),
    ],
)
def test_one_that_is_not_gathered_is_noticed_once(ranks, size, fields, ways):
    results = ranks(size, _contrastive, fields, False)
    [line] = results[0][2]
    assert ways in line and "couples samples" in line and "gather_samples" in line
    assert all(said == [] for _, _, said in results[1:])
    [(expected, _, _)] = ranks(1, _contrastive, dict(zero=0), True)
    assert abs(results[0][0][-1] - expected[-1]) > 1e-3


def _independent(fields: dict[str, Any]) -> list[str]:
    torch.manual_seed(0)
    engine = ts.parallelize(
        GPT(61, 16, 2, 2, 30, dropout=0.1), ts.Plan(**fields), optimizer=ADAMW, loss_fn=next_token_loss, debug=True
    )
    mesh = engine.mesh
    tokens = torch.randint(0, 61, (16, 9), generator=torch.Generator().manual_seed(mesh.dp_rank))
    targets = tokens[:, 1:].clone()
    targets[:, 2 + mesh.dp_rank :] = -100  # ranks have different numbers of targets
    return _debug_lines(engine, (tokens[:, :-1], targets))


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (2, dict(zero=3, micro_batches=2)),
        pytest.param(4, dict(pp=2, micro_batches=4), marks=pytest.mark.slow),
        (2, dict(precision="bf16", zero=2)),
    ],
    ids=str,
)
def test_cross_entropy_is_not_suspected(ranks, size, fields):
    assert all(said == [] for said in ranks(size, _independent, fields))


def _unequal() -> list[str]:
    torch.manual_seed(0)
    engine = ts.parallelize(nn.Linear(4, 4), ts.Plan(), optimizer=ADAMW, loss_fn=squares, debug=True)
    length = 3 + engine.mesh.dp_rank
    return _debug_lines(engine, (torch.ones(2, length, 4), torch.ones(2, length, 4)))


def test_batches_that_cannot_be_joined_are_said_to_be_unchecked(ranks):
    assert ranks(2, _unequal) == [
        ["debug: whether the loss couples samples is not checked: the ranks' batches cannot be joined"],
        [],
    ]
