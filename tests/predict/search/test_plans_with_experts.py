"""Searches for plans of mixtures of experts: `ep` is searched, and predicted as it is estimated."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from tests.predict.search.test_find_plans import RATES, asked
from torch import nn

import tensorshard as ts
from tensorshard.predict.hardware import Hardware
from tensorshard.predict.search.candidates import candidates
from tensorshard.predict.search.find_plans import find_plans
from tensorshard.predict.search.problem import SearchProblem, make_problem
from tensorshard.predict.search.search import BY_TIME, Search

_CONFIG = transformers.MixtralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    use_cache=False,
)


def _loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def _arguments(**fixed: Any) -> dict[str, Any]:
    ids = torch.zeros(16, 16, dtype=torch.long)
    given = dict(world_size=4, inputs={"input_ids": ids}, targets=ids, loss_fn=_loss, global_batch=16, fixed=fixed)
    return asked(**given, hardware=Hardware("four", 1 << 30, 0, RATES), memory=None)


def _problem(**fixed: Any) -> SearchProblem:
    return make_problem(partial(transformers.MixtralForCausalLM, _CONFIG), **_arguments(**fixed))


def test_ep_divides_the_ranks_that_shard_and_the_experts():
    listed, _ = candidates(_problem(tp=1, pp=1, zero=3, recompute="none"), (1, 2, 4))
    assert {(one.plan.dp_shard, one.plan.ep) for one in listed if one.plan.cp == 1} >= {(4, 1), (4, 2), (4, 4), (2, 2)}
    assert all(one.plan.dp_shard * one.plan.cp % one.plan.ep == 0 for one in listed)
    assert {one.plan.ep for one in candidates(_problem(tp=1, pp=1, zero=3, recompute="none"), (1,))[0]} == {1}
    listed, refused = candidates(_problem(ep=4, tp=2, cp=1, zero=3, recompute="none"), (1, 2, 4))
    assert not listed
    assert "ep=4 does not divide the 2 ranks of dp_shard" in map(str, refused)


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [dict(tp=1, pp=1), dict(tp=2, pp=1), dict(tp=1, pp=2)], ids=str)
def test_predictions_are_near_estimates(fixed):
    done = Search(_problem(ep=2, cp=1, recompute="none", **fixed)).run(BY_TIME, 1)
    assert done.fitting[0].plan.ep == 2
    assert done.facts is not None and done.facts.expert_parts == (1, 2, 4)
    some = [one for one in done.considered if one.is_estimated or one.candidate.order % 9 == 4]
    for one in some:
        if not one.is_estimated:
            one.estimate = done.problem.under(2).estimate(one.plan)
        assert one.estimate is not None
        assert 0.5 < one.first.memory / one.estimate.largest.peak_device <= 1.005, one.plan
        if one.plan.pp == 1:
            assert one.first.seconds == pytest.approx(done.problem.seconds(one.estimate), rel=0.25), one.plan


@pytest.mark.slow
def test_ep_is_chosen_where_it_saves_messages_and_refused_without_experts():
    found = find_plans(
        partial(transformers.MixtralForCausalLM, _CONFIG), **_arguments(tp=1, pp=1, cp=1, recompute="none")
    )
    assert found.best.plan.ep > 1  # two thirds of the gradients need not be reduced over all ranks
    assert any(str(one).startswith("ep=1 takes") for one in found.rejected)
    dense = asked(fixed=dict(ep=2), hardware=Hardware("four", 1 << 30, 0, RATES))
    with pytest.raises(ValueError, match="Sequential has no module that ep splits"):
        find_plans(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)), **dense)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [dict(ep=2, zero=1), dict(ep=4, cp=2, zero=3), dict(ep=2, tp=2, zero=1, micro_batches=2)], ids=str
)
def test_an_estimate_counts_what_tokens_send(fields):
    """Each way, `k f (N - 1) / N` numbers for a token of `f` features with `k` choices; indices and weights beside."""
    asked, samples, layers = _arguments(), 4, 2
    plan = ts.Plan(**fields)
    ids = asked["targets"][:samples]
    given = {name: asked[name] for name in ("world_size", "optimizer", "loss_fn")}
    build = partial(transformers.MixtralForCausalLM, _CONFIG)
    found = ts.estimate(build, plan, inputs={"input_ids": ids}, targets=ids, **given)
    numbers = _CONFIG.num_experts_per_tok * _CONFIG.hidden_size * (plan.ep - 1) / plan.ep
    ways = 4  # there and back, in forward and in backward
    expected = 4 * numbers * ways * layers * ids.numel() / plan.cp
    assert expected <= found.largest.traffic["ep"]["all_to_all"].sent <= 1.05 * expected
