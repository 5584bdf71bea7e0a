"""The examples of several models, and of losses that compare samples, print the losses of one process."""

import re
from typing import Any

import pytest

from scripts import run_example

STEPS = ["--steps", "20"]
CASES: dict[str, tuple[str, int, list[str]]] = {
    "dpo-zero3-tp": ("dpo", 2, ["--policy", "zero=3", "--reference", "tp=2"]),
    "dpo-tp-zero3": ("dpo", 2, ["--policy", "tp=2", "--reference", "zero=3"]),
    "dpo-pp": ("dpo", 2, ["--policy", "pp=2,micro_batches=4", "--reference", "zero=3"]),
    "dpo-zero1-pp": ("dpo", 2, ["--policy", "zero=1", "--reference", "pp=2,micro_batches=2"]),
    "gan-zero1": ("gan", 2, ["--zero", "1"]),
    "gan-zero3": ("gan", 2, ["--zero", "3"]),
    "gan-tp": ("gan", 2, ["--tp", "2"]),
    "distillation-zero": ("distillation", 2, ["--student", "zero=1", "--teacher", "zero=3"]),
    "distillation-tiled": ("distillation", 2, ["--student", "zero=3,logits=tiled", "--teacher", "zero=1,logits=tiled"]),
    "distillation-tp": ("distillation", 2, ["--student", "tp=2,logits=tiled", "--teacher", "tp=2,logits=tiled"]),
    "distillation-four": ("distillation", 4, ["--student", "tp=2,zero=1", "--teacher", "tp=2,zero=3"]),
    "dpo-four": ("dpo", 4, ["--policy", "zero=3,tp=2", "--reference", "dp_replicate=2,zero=3"]),
}


def _losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss \w*\s*([\d.]+)", printed)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_process(ranks, case):
    name, size, options = CASES[case]
    alone: Any = ranks(1, run_example, name, *STEPS)[0]
    expected, found = _losses(alone), _losses(ranks(size, run_example, name, *options, *STEPS)[0])
    assert len(expected) >= 2 and len(set(expected)) == len(expected)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
