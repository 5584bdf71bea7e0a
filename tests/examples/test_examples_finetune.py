"""The fine-tuning examples, under other plans than the one that their figures are compared with."""

import re

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


PLANS = {
    "zero3": (2, "zero=3"),
    "tp": (2, "tp=2,sequence_parallel=True"),
    "four": (4, "tp=2,pp=2,micro_batches=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANS)
def test_peft_reads_adapters_that_any_plan_trained(ranks, tmp_path, case):
    pytest.importorskip("peft")
    size, plan = PLANS[case]
    options = ["--steps", "4", "--output", str(tmp_path / "adapters")]
    expected, found = (
        [
            float(number)
            for number in re.findall(r"loss ([\d.]+)", ranks(world, run_example, "lora", *options, *more)[0])
        ]
        for world, more in ((1, []), (size, ["--plan", plan]))
    )
    assert len(expected) == 3 and expected[0] > expected[1]
    assert expected[1] == pytest.approx(expected[2], rel=1e-6)
    assert found == pytest.approx(expected, rel=1e-5)
