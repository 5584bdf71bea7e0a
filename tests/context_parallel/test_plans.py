"""``Plan(cp=N)`` with the other axes trains as one process does."""

from typing import Any

import pytest

import parity

# id: (model, ranks, fields of the plan)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt-cp2-zero3": ("gpt", 2, dict(cp=2)),
    "gpt-cp2-zero0-micro2-clip": ("gpt", 2, dict(cp=2, zero=0, micro_batches=2, clip_grad_norm=1.1)),
    "gpt-cp2-zero1-full": ("gpt", 2, dict(cp=2, zero=1, recompute="full")),
    "gpt-cp2-zero3-selective": ("gpt", 2, dict(cp=2, recompute="selective")),
    "tied-cp4-zero2": ("gpt_tied", 4, dict(cp=4, zero=2)),
    "gpt-2xcp2-zero3": ("gpt", 4, dict(cp=2, zero=3)),
    "gpt-2xcp2-zero1-micro4": ("gpt", 4, dict(cp=2, zero=1, micro_batches=4)),
    "gpt-2x1xcp2-zero3": ("gpt", 4, dict(dp_replicate=2, dp_shard=1, cp=2)),
    "gpt-cp2-offload": ("gpt", 2, dict(cp=2, zero=2, offload="cpu")),
    "llama-cp2-zero3-full": ("llama", 2, dict(cp=2, recompute="full")),
    "hf_bert-cp2-zero0": ("hf_bert", 2, dict(cp=2, zero=0)),
    "vit-cp2-zero0": ("vit", 2, dict(cp=2, zero=0)),
    "resnet-cp2-zero3": ("resnet", 2, dict(cp=2)),
    "mixtral-cp2-zero3": ("mixtral", 2, dict(cp=2)),
    "t5-cp2-zero1": ("t5", 2, dict(cp=2, zero=1)),
    "bloom-cp2-zero3": ("bloom", 2, dict(cp=2)),
}


@pytest.mark.fast_cases("gpt-cp2-zero3", "llama-cp2-zero3-full")
@pytest.mark.parametrize("case", CASES)
def test_fp32_is_exact(ranks, case):
    kind, world_size, fields = CASES[case]
    found = ranks(world_size, parity.train, kind, fields)
    data_ranks = world_size // fields["cp"]
    cuts = (fields.get("micro_batches", 1), data_ranks) if kind == "resnet" else (1, 1)
    expected = parity.reference(kind, fields.get("clip_grad_norm"), parity.STEPS, *cuts)
    parity.assert_same(found[0], expected, 1e-5)
    for other in found[1:]:
        assert other["losses"] == found[0]["losses"]
        assert other["norms"] == found[0]["norms"]
