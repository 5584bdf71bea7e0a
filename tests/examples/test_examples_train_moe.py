"""The example of a mixture prints the same losses however its experts and layers are split."""

import pytest

from scripts import run_example


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [pytest.param(2, ["--ep", "2"], id="ep2"), pytest.param(4, ["--ep", "2", "--pp", "2"], id="ep2-pp2")],
)
def test_losses_are_those_of_one_process(ranks, size, options):
    alone = ranks(1, run_example, "train_moe", "--ep", "1", "--steps", "3")[0]
    together = ranks(size, run_example, "train_moe", *options, "--steps", "3")[0]
    losses = [[line for line in text.splitlines() if line.startswith("step")] for text in (alone, together)]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    assert "experts are split over 2 ranks of dp_shard" in together
