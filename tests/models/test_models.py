"""A dozen of the models of ``python -m benchmarks models`` under plans that suit them: each exactly as one process."""

from functools import cache

import pytest
import torch
from benchmarks.harness.models_judge import FP32_TOLERANCE, difference
from benchmarks.harness.models_training import Trained, train_alone, train_under
from benchmarks.models.plans import PLANS
from benchmarks.models.registry import find_cases

from bounds import assert_within

# (model, plan): the least share of the weights that tp has to split, None without tp.
CELLS: dict[tuple[str, str], float | None] = {
    ("plain/nanoGPT", "tp"): 0.9,
    ("plain/nanoGPT", "pp"): None,
    ("plain/minGPT", "tp"): 0.9,
    ("plain/hand-Llama", "tp-pp"): 0.9,
    ("plain/ResNet", "zero3"): None,
    ("plain/ResNet", "tp"): 0.5,
    ("plain/U-Net", "pp"): None,
    ("plain/spectral-norm-hook", "zero3"): None,
    ("plain/vector-quantisation", "full"): None,
    ("transformers/Llama", "tp"): 0.9,
    ("transformers/Llama", "sp"): 0.9,
    ("transformers/Gemma 2", "tp"): 0.5,
    ("transformers/GPT-2", "tp"): 0.6,
    ("transformers/T5", "pp"): None,
    ("transformers/Mixtral", "zero3"): None,
    ("transformers/ViT", "tp"): 0.6,
    ("transformers/ConvNeXt", "zero3"): None,
}

# What a faster test covers in part.

# Of these a convolution's gradient in fp32 hangs on how a sum of a batch is rounded: whether a ReLU opens.
IN_FP64 = ["plain/ResNet"]
BOUNDS = {torch.float32: FP32_TOLERANCE, torch.float64: 1e-11}


@pytest.fixture(scope="module")
def alone():
    """What one plain process makes of a model, in micro-batches as the plan has them."""

    @cache
    def train(key: str, micro_batches: int, dtype: torch.dtype) -> Trained:
        return train_alone(find_cases()[key], micro_batches, dtype)

    return train


def _train(key: str, plan: str, dtype: torch.dtype) -> Trained:
    return train_under(find_cases()[key], PLANS[plan], dtype=dtype)


@pytest.mark.fast_cases("transformers/Llama-tp", "plain/spectral-norm-hook-zero3", "plain/vector-quantisation-full")
@pytest.mark.parametrize(("key", "plan"), CELLS)
def test_a_stock_model_trains_as_in_one_process(ranks, alone, key, plan):
    dtype = torch.float64 if key in IN_FP64 else torch.float32
    found = ranks(PLANS[plan].ranks, _train, key, plan, dtype)
    expected = alone(key, PLANS[plan].micro_batches, dtype)
    assert_within(difference(found[0], expected).largest, BOUNDS[dtype], f"{key} under {plan}")
    assert all(other.losses == found[0].losses for other in found)
    share = CELLS[key, plan]
    if share is not None:
        assert found[0].split_share >= share
