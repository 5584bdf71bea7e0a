"""The benchmark of context parallelism: contenders train as one process does, and bytes are those of the formula."""

from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist
from benchmarks.sequences import SequenceWork

WORK = SequenceWork("llama", length=64, width=32, heads=4, key_heads=1, vocabulary=31)


def _run(builder: str, size: int, options: dict[str, Any]) -> tuple[list[float], int]:
    step, received = import_module(f"benchmarks.peers.{builder}").build(WORK, dist.get_rank(), size, **options)
    losses = [step() for _ in range(2)]
    before = received()
    return [*losses, step()], received() - before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "size", "options"),
    [
        pytest.param("sequence_ours", 2, dict(cp_order="contiguous"), id="contiguous-2"),
        pytest.param("sequence_ours", 4, dict(cp_order="zigzag"), id="zigzag-4"),
        pytest.param("sequence_ring", 2, {}, id="sequence_ring-2"),
        pytest.param("sequence_ring", 4, {}, id="sequence_ring-4"),
    ],
)
def test_contenders_train_as_one_process_and_attention_receives_what_the_formula_says(ranks, builder, size, options):
    expected = ranks(1, _run, "sequence_ours", 1, {})[0][0]
    found = ranks(size, _run, builder, size, options)
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=1e-5)
    if options:
        received = sum(count for _, count in found) / size
        assert received == pytest.approx(WORK.attention_bytes(size, options["cp_order"]), rel=0.02)


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="no model 'gru'; there are 'llama' and 'mamba'"):
        SequenceWork("gru", length=8).model()
