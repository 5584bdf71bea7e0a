"""``Plan(ep=N)`` trains mixtures of experts as one process does."""

from typing import Any

import pytest

import parity

# id: (model, ranks, fields of the plan)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ep2-zero0": ("mixtral", 2, dict(ep=2, zero=0)),
    "ep2-zero1-clip": ("mixtral", 2, dict(ep=2, zero=1, clip_grad_norm=0.5)),
    "ep2-zero2-micro2-full": ("mixtral", 2, dict(ep=2, zero=2, micro_batches=2, recompute="full")),
    "ep2-zero3": ("mixtral", 2, dict(ep=2, zero=3)),
    "ep4-zero0-micro2": ("mixtral", 4, dict(ep=4, zero=0, micro_batches=2)),
    "ep4-zero2": ("mixtral", 4, dict(ep=4, zero=2)),
    "ep4-zero3-micro4-selective": ("mixtral", 4, dict(ep=4, zero=3, micro_batches=4, recompute="selective")),
    "2xep2-zero0": ("mixtral", 4, dict(ep=2, zero=0)),
    "2xep2-zero1": ("mixtral", 4, dict(ep=2, zero=1)),
    "2xep2-zero2-micro4-clip": ("mixtral", 4, dict(ep=2, zero=2, micro_batches=4, clip_grad_norm=0.5)),
    "2xep2-zero3-clip-full": ("mixtral", 4, dict(ep=2, zero=3, clip_grad_norm=0.5, recompute="full")),
    "2-replicas-ep2-zero0": ("mixtral", 4, dict(dp_replicate=2, dp_shard=2, ep=2, zero=0)),
    "2-replicas-ep2-zero1": ("mixtral", 4, dict(dp_replicate=2, dp_shard=2, ep=2, zero=1)),
    "2-replicas-ep2-zero2-micro2": ("mixtral", 4, dict(dp_replicate=2, dp_shard=2, ep=2, zero=2, micro_batches=2)),
    "2-replicas-ep2-zero3-clip": ("mixtral", 4, dict(dp_replicate=2, dp_shard=2, ep=2, zero=3, clip_grad_norm=0.5)),
}


@pytest.mark.fast_cases("ep2-zero1-clip")
@pytest.mark.parametrize("case", CASES)
def test_fp32_is_exact(ranks, case):
    kind, world_size, fields = CASES[case]
    found = ranks(world_size, parity.train, kind, fields)
    expected = parity.reference(kind, fields.get("clip_grad_norm"), parity.STEPS)
    parity.assert_same(found[0], expected, 1e-5)
    if expected["norms"]:
        assert found[0]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for other in found[1:]:
        assert other["losses"] == found[0]["losses"]
        assert other["norms"] == found[0]["norms"]
