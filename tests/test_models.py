"""A dozen of the models of ``python -m benchmarks models`` under plans that suit them: each exactly as one process."""

import pytest
from benchmarks.harness.models_judge import FP32_TOLERANCE, difference
from benchmarks.harness.models_training import Trained, train_alone, train_under
from benchmarks.models.plans import PLANS
from benchmarks.models.registry import find_cases

from bounds import assert_within
from slow_cases import mark_slow

# (model, plan): the least share of the weights that tp has to split, None without tp.
CELLS: dict[tuple[str, str], float | None] = {
    ("plain/nanoGPT", "zero3"): None,
    ("plain/nanoGPT", "tp"): 0.6,
    ("plain/nanoGPT", "pp"): None,
    ("plain/minGPT", "tp"): 0.6,
    ("plain/hand-Llama", "tp-pp"): 0.9,
    ("plain/hand-Llama", "sp"): 0.9,
    ("plain/ResNet", "zero3"): None,
    ("plain/ResNet", "pp"): None,
    ("plain/U-Net", "pp"): None,
    ("plain/spectral-norm-hook", "zero3"): None,
    ("plain/vector-quantisation", "full"): None,
    ("transformers/Llama", "full"): None,
    ("transformers/Llama", "tp"): 0.9,
    ("transformers/Gemma 2", "tp"): 0.5,
    ("transformers/GPT-2", "tp"): 0.6,
    ("transformers/GPT-2", "pp"): None,
    ("transformers/BERT", "sp"): 0.6,
    ("transformers/T5", "pp"): None,
    ("transformers/Mixtral", "zero3"): None,
    ("transformers/ViT", "tp"): 0.6,
    ("transformers/ViT", "pp"): None,
    ("transformers/ConvNeXt", "zero3"): None,
}

SLOW: list[tuple[str, str]] = []


@pytest.fixture(scope="module")
def alone():
    """What one plain process makes of a model, in micro-batches as the plan has them."""
    known: dict[tuple[str, int], Trained] = {}

    def train(key: str, micro_batches: int) -> Trained:
        if (key, micro_batches) not in known:
            known[key, micro_batches] = train_alone(find_cases()[key], micro_batches)
        return known[key, micro_batches]

    return train


def _train(key: str, plan: str) -> Trained:
    return train_under(find_cases()[key], PLANS[plan])


@pytest.mark.parametrize(("key", "plan"), mark_slow(CELLS, SLOW))
def test_a_stock_model_trains_as_in_one_process(ranks, alone, key, plan):
    found = ranks(PLANS[plan].ranks, _train, key, plan)
    expected = alone(key, PLANS[plan].micro_batches)
    assert_within(difference(found[0], expected).largest, FP32_TOLERANCE, f"{key} under {plan}")
    assert all(other.losses == found[0].losses for other in found)
    share = CELLS[key, plan]
    if share is not None:
        assert found[0].split_share >= share
