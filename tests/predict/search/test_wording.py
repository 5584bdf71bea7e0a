"""Plans in words."""

import pytest
import yaml

import tensorshard as ts
from tensorshard.predict.search.plan_search import plan_words


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tp": 4, "zero": 0},
        {"tp": 2, "sequence_parallel": True},
        {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "recompute": "full", "micro_batches": 4},
        {"pp": 2, "pp_schedule": "zbv", "micro_batches": 4, "zero": 1},
        {"zero": 1, "offload": "cpu"},
    ],
)
def test_a_plans_words_are_overrides_that_give_it_again(fields):
    plan = ts.Plan(**fields).resolve(4)
    overrides = {name: yaml.safe_load(value) for name, value in (word.split("=") for word in plan_words(plan).split())}
    assert ts.Plan(**overrides).resolve(4) == plan
