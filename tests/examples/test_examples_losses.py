"""The example of forces prints the same losses on any number of ranks."""

import pytest

from scripts import run_example


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [(2, ["--zero", "3"]), pytest.param(4, ["--zero", "3", "--tp", "2"], marks=pytest.mark.slow)],
)
def test_forces_are_those_of_one_process(ranks, size, options):
    short = ["--steps", "20", "--batch-size", "8"]
    alone = ranks(1, run_example, "forces", *short)[0]
    assert alone.count("force") == 2
    assert ranks(size, run_example, "forces", *options, *short)[0] == alone
