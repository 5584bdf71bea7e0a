"""The example of long sequences prints the same losses however the positions are cut."""

import pytest

from scripts import run_example


@pytest.mark.slow
@pytest.mark.parametrize(("size", "options"), [(2, ["--cp", "2"]), (4, ["--cp", "2", "--tp", "2"])])
def test_losses_are_those_of_one_process(ranks, size, options):
    short = ["--length", "256", "--steps", "3"]
    alone = ranks(1, run_example, "long_context", "--cp", "1", *short)[0]
    together = ranks(size, run_example, "long_context", *options, *short)[0]
    losses = [text.split("training took")[0] for text in (alone, together)]
    assert losses[0].count("loss") == 3
    assert losses[0] == losses[1]
