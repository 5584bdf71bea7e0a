"""Training with logits that are never held gives what one process gives that holds them."""

from typing import Any
from unittest import mock

import pytest

import parity
from tensorshard.loss import tiled_loss, tiles

# id: (model, ranks, fields of the plan). Between them, each kind of model, layout and level.
PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt-1": ("gpt", 1, dict(micro_batches=2)),
    "gpt-2-zero0": ("gpt", 2, dict(zero=0)),
    "gpt-2-zero3-full": ("gpt", 2, dict(zero=3, recompute="full")),
    "tied-2-zero1-micro4": ("gpt_tied", 2, dict(zero=1, micro_batches=4)),
    "tied-2-zero3": ("gpt_tied", 2, dict(zero=3)),
    "bert-2-zero2": ("bert", 2, dict(zero=2)),
    "hf_bert-2-zero3": ("hf_bert", 2, dict(zero=3)),
    "t5-2-zero3": ("t5", 2, dict(zero=3)),
    "gpt2-1": ("gpt2", 1, dict()),
    "vit-2-zero0-full": ("vit", 2, dict(zero=0, recompute="full")),
    "many_classes-2-zero3": ("vit_317", 2, dict(zero=3)),
    "many_classes-tp2": ("vit_317", 2, dict(tp=2)),
    "llama-2-zero3": ("llama", 2, dict(zero=3)),
    "qwen-2-zero3": ("qwen3", 2, dict(zero=3, recompute="selective")),
    "qwen-tp2": ("qwen3", 2, dict(tp=2)),
    "capped-2-zero2": ("gemma2", 2, dict(zero=2, micro_batches=2)),
    "capped-tp2": ("gemma2", 2, dict(tp=2)),
    "gpt-tp2": ("gpt", 2, dict(tp=2, zero=0)),
    "gpt_101-tp2-uneven": ("gpt_101", 2, dict(tp=2, zero=3)),
    "tied-tp2-sequence": ("gpt_tied", 2, dict(tp=2, sequence_parallel=True)),
    "llama-tp2-sequence": ("llama", 2, dict(tp=2, sequence_parallel=True, recompute="full")),
    "t5-tp2": ("t5", 2, dict(tp=2)),
    "gpt-pp2": ("gpt", 2, dict(pp=2, micro_batches=4)),
    "tied-pp2-gpipe": ("gpt_tied", 2, dict(pp=2, micro_batches=2, pp_schedule="gpipe")),
    "llama-tp2-dp2": ("llama", 4, dict(tp=2, dp_shard=2, zero=3)),
    "gpt_101-tp4": ("gpt_101", 4, dict(tp=4)),
    "gpt-pp2-tp2": ("gpt", 4, dict(pp=2, tp=2, micro_batches=2, recompute="selective")),
    "gpt-pp2-dp2-zero3": ("gpt", 4, dict(pp=2, dp_shard=2, zero=3, micro_batches=2)),
}


def _train(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Of small tiles, so that there are several, and with what the summary says of it."""
    with (
        mock.patch.object(tiles, "tile_width", lambda *_: 16),
        mock.patch.object(tiled_loss, "rows_at_once", lambda *_: 48),
    ):
        engine = parity.make_engine(kind, {**fields, "logits": "tiled"})
        losses = []
        for step in range(parity.STEPS):
            batch = parity.shard(engine, *parity.batch(kind, step))
            losses.append(engine.step(*batch).item())
        evaluated = engine.evaluate(*batch).item()
        state = engine.full_state_dict()
    return {"losses": losses, "state": state, "evaluated": evaluated, "said": engine.summary().logits}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANS)
def test_fp32_is_exact(ranks, case):
    kind, world_size, fields = PLANS[case]
    found = ranks(world_size, _train, kind, fields)
    parity.assert_same(found[0], parity.reference(kind), 1e-5)
    assert all(other["evaluated"] == found[0]["evaluated"] for other in found)
    said = found[-1]["said"].splitlines()  # of a pipeline the last rank has the last layer
    assert said[-1].endswith("are not held)"), said
