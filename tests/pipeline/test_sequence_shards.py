"""Under sequence parallelism each rank sends its shard of a sequence to the next stage."""

from functools import partial
from typing import Any

import pytest
import torch

import parity
import tensorshard as ts
from tensorshard.models import GPT, next_token_loss

SAMPLES, LENGTH, WIDTH, RANKS, TP = 16, 512, 128, 4, 2

# Kind of model, ranks, and fields of the plan beside pp=2, tp=2 and sequence_parallel.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 4, dict(micro_batches=2)),
    "llama-full": ("llama", 4, dict(micro_batches=4, recompute="full", clip_grad_norm=0.5)),
    "gpt-three-blocks-interleaved": ("gpt", 4, dict(micro_batches=2, pp_schedule="interleaved_1f1b")),
    "gpt2-zbv": ("gpt2", 4, dict(micro_batches=4, pp_schedule="zbv")),
    "qwen3-interleaved-zero-bubble": ("qwen3", 4, dict(micro_batches=4, pp_schedule="interleaved_zero_bubble")),
    "vit-of-an-odd-length": ("vit", 4, dict(micro_batches=2, pp_schedule="gpipe")),
    "bert": ("bert", 4, dict(micro_batches=2, recompute="selective")),
    "t5-two-sequences": ("t5", 4, dict(micro_batches=2)),
    "tied-zero3": ("gpt_tied", 8, dict(zero=3, micro_batches=2)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_stages_that_send_shards_train_as_one_process_does(ranks, case):
    kind, world_size, fields = CASES[case]
    found = ranks(world_size, parity.train, kind, {"pp": 2, "tp": 2, "sequence_parallel": True, **fields})
    expected = parity.reference(kind, fields.get("clip_grad_norm"))
    parity.assert_same(found[0], expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_messages_and_what_is_kept_are_shards(recompute):
    def of(*, sequence_parallel: bool) -> Any:
        plan = ts.Plan(
            pp=RANKS, tp=TP, sequence_parallel=sequence_parallel, micro_batches=8, pp_schedule="gpipe",
            recompute=recompute,
        )  # fmt: skip
        tokens = torch.zeros(8 * SAMPLES, LENGTH, dtype=torch.long)
        estimate = ts.estimate(
            partial(GPT, vocab_size=64, context_length=LENGTH, num_layers=RANKS, num_heads=4, width=WIDTH),
            plan,
            world_size=RANKS * TP,
            inputs=tokens,
            targets=tokens,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            loss_fn=next_token_loss,
        )
        return estimate.ranks[1]

    whole, shards = of(sequence_parallel=False), of(sequence_parallel=True)
    output = SAMPLES * LENGTH * WIDTH * 4
    assert whole.traffic["pp"]["send"].nbytes == 2 * 8 * output  # eight outputs, and eight gradients of inputs
    assert shards.traffic["pp"]["send"].nbytes == 8 * output
    if recompute == "full":
        assert shards.by_category["activations"] <= whole.by_category["activations"] - 7 * output // 2
