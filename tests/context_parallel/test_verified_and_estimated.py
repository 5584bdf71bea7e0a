"""``ts.verify``, ``ts.estimate`` and ``ts.find_plans`` know that ranks have parts of sequences."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import parity
import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.search.candidates import candidates
from tensorshard.predict.search.problem import make_problem

LONG = partial(GPT, vocab_size=64, context_length=2048, num_layers=2, num_heads=2, width=128)


def asked(tokens: torch.Tensor, **options: Any) -> dict[str, Any]:
    """Arguments of a search among two ranks, in which only the axes are left open."""
    fixed = {"tp": 1, "pp": 1, "recompute": "none", "offload": None, "zero": 1}
    given = {
        "world_size": 2, "inputs": tokens, "targets": tokens, "optimizer": parity.ADAMW, "loss_fn": next_token_loss,
        "hardware": "h100", "fixed": fixed | options.pop("fixed", {}),
    }  # fmt: skip
    return given | options


def searched(inputs: torch.Tensor, **options: Any) -> list[tuple[int, int, int]]:
    """Data ranks, ranks that share sequences, and micro-batches of the plans that a search considers."""
    rest = {"memory": None, "hardware": "h100", "global_batch": None}
    listed, _ = candidates(make_problem(LONG, **rest | asked(inputs, **options)))
    return sorted((one.plan.dp_size, one.plan.cp, one.plan.micro_batches) for one in listed)


def test_a_search_splits_sequences_where_samples_cannot_be_split_further():
    tokens = torch.zeros(1, 512, dtype=torch.int64)
    assert searched(tokens, global_batch=1) == [(1, 2, 1)]
    assert searched(tokens, global_batch=4) == [(1, 2, 4), (2, 1, 1), (2, 1, 2)]
    assert searched(tokens, global_batch=4, fixed={"cp": 2}) == [(1, 2, 1), (1, 2, 2), (1, 2, 4)]
    assert searched(tokens, global_batch=6, world_size=4, fixed={"micro_batches": 1}) == [(2, 2, 1)]
    one_sample = {"global_batch": 2, "fixed": {"micro_batches": 2, "dp_shard": 1, "dp_replicate": 1}}
    assert searched(tokens, **one_sample, world_size=8) == [(1, 8, 2)]
    features, images = torch.zeros(1, 512), torch.zeros(1, 3, 32, 32)
    assert searched(features, global_batch=2, fixed={"micro_batches": 2}) == []
    assert searched(images, global_batch=2, fixed={"micro_batches": 2}) == [(1, 2, 2)]
    assert searched(tokens, global_batch=2, fixed={"compile": True}) == [(2, 1, 1)]


@pytest.mark.slow
def test_a_search_proposes_cp_where_a_sequence_does_not_fit_and_says_what_is_exchanged():
    tokens = torch.zeros(2, 2048, dtype=torch.int64)
    roomy = ts.find_plans(LONG, **asked(tokens, global_batch=2, top=2))
    assert roomy.best.plan.dp_size == 2
    assert all(found.plan.cp == 1 for found in roomy)  # the others compute as much, and exchange parts of sequences
    given = {name: value for name, value in asked(tokens).items() if name != "fixed"}
    whole, halves = (
        ts.estimate(LONG, ts.Plan(cp=cp, zero=1, micro_batches=cp), **given | {"inputs": part, "targets": part}).largest
        for cp, part in ((1, tokens[:1]), (2, tokens))
    )
    between = (halves.peak_device + whole.peak_device) // 2
    found = ts.find_plans(LONG, **asked(tokens, global_batch=2, memory=between, fixed={"cp_order": "contiguous"}))
    assert (found.best.plan.dp_size, found.best.plan.cp, found.best.plan.micro_batches) == (1, 2, 2)
    assert found.best.memory == halves.peak_device < between < whole.peak_device
    assert "cp=1 does not fit by" in " ".join(found.describe().split())
    assert "cp=2 splits sequences, of which each rank receives" in found.describe()
    assert "cp=1 does not fit by" in " ".join(found.describe().split())


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(cp=2), dict(cp=2, zero=1, cp_order="zigzag")], ids=str)
def test_verify_compares_ranks_that_share_sequences(fields):
    inputs, targets = parity.batch("gpt", 0)
    found = ts.verify(
        partial(parity.build, "gpt"), ts.Plan(**fields), inputs=inputs, targets=targets, optimizer=parity.ADAMW,
        loss_fn=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()), world_size=2,
    )  # fmt: skip
    assert found, found.describe()


@pytest.mark.slow
def test_an_estimate_counts_a_ranks_part_of_activations():
    tokens = torch.zeros(2, 512, dtype=torch.int64)
    held = {
        cp: ts.estimate(
            partial(GPT, vocab_size=256, context_length=512, num_layers=4, num_heads=4, width=128), ts.Plan(cp=cp),
            world_size=cp, inputs=tokens, targets=tokens, optimizer=parity.ADAMW, loss_fn=next_token_loss,
        ).ranks[0].by_category["activations"]
        for cp in (1, 2, 4)
    }  # fmt: skip
    for cp in (2, 4):
        assert held[cp] <= 1.1 * held[1] / cp
