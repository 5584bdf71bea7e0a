"""The fine-tuning example, under other plans than the one that its figures are compared with."""

import pytest

from scripts import run_example


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "size", "options"),
    [
        ("causal", 2, ["--zero", "3"]),
        ("causal", 4, ["--tp", "2", "--pp", "2"]),
        ("classifier", 2, ["--tp", "2"]),
        ("classifier", 4, ["--tp", "2", "--pp", "2"]),
    ],
)
def test_every_plan_ends_with_the_same_figures(ranks, tmp_path, task, size, options):
    printed = {
        world: ranks(
            world, run_example, "finetune", task, *chosen, "--steps", "4", "--output", str(tmp_path / f"on{world}")
        )[0]
        for world, chosen in ((1, []), (size, options))
    }
    measured = [text.split("trained: ")[1].split(";")[0] for text in printed.values()]
    assert measured[0] == measured[1]
    assert all(f"read again from {tmp_path / f'on{world}'}: {measured[0]}" in printed[world] for world in printed)
