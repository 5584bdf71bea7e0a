"""parallelize(model, "auto", ...): rank 0 chooses for all ranks, in a process of its own."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.comm import forked
from tensorshard.predict.search.find_plans import guess_targets


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def _auto(**options: Any) -> ts.Engine:
    given = {"optimizer": ADAMW, "loss_fn": nn.functional.cross_entropy, "sample_inputs": torch.zeros(4, 32)} | options
    return ts.parallelize(_model, given.pop("plan", "auto"), **given)


def _chosen_and_trained() -> tuple[dict[str, Any], list[float], bool]:
    engine = _auto(fixed={"zero": 1, "tp": 1, "pp": 1})
    samples = 8 // engine.mesh.dp_size
    torch.manual_seed(0)
    inputs, targets = torch.randn(8, 32), torch.randint(8, (8,))
    mine = slice(engine.mesh.dp_rank * samples, (engine.mesh.dp_rank + 1) * samples)
    losses = [engine.step(inputs[mine], targets[mine]).item() for _ in range(2)]
    return engine.plan.to_dict(), losses, torch.distributed.is_initialized()


@pytest.mark.slow
def test_all_ranks_take_what_the_first_one_chose_and_train(ranks):
    first, second = ranks(2, _chosen_and_trained)
    assert first == second
    plan, losses, _ = first
    assert (plan["zero"], plan["tp"], plan["pp"], plan["dp_shard"]) == (1, 1, 1, 2)
    assert losses[1] < losses[0]


def _chosen_without_forks() -> tuple[Any, Any, bool]:
    in_a_fork = _chosen_and_trained()
    before = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked, "_runs_autograd", lambda: False)
        engine = _auto(fixed={"zero": 1, "tp": 1, "pp": 1})
        same = torch.equal(before, torch.get_rng_state()) and engine.plan.to_dict() == in_a_fork[0]
        return in_a_fork, _chosen_and_trained(), same


@pytest.mark.slow
def test_a_rank_whose_forks_cannot_run_autograd_searches_itself(ranks):
    for in_a_fork, here, same in ranks(2, _chosen_without_forks):
        assert here == in_a_fork and same


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"plan": "fastest"}, "plan is 'fastest'; it must be a tensorshard.Plan, or 'auto'"),
        ({"sample_inputs": None}, "plan 'auto' was asked for without sample_inputs"),
        ({"plan": ts.Plan(), "fixed": {"tp": 1}}, "fixed was given with a Plan; it is for parallelize(model, 'auto'"),
        ({"loss_fn": 3}, "loss_fn is an int"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options, said):
    with pytest.raises((ValueError, TypeError)) as error:
        _auto(**options)
    assert said in str(error.value)


def test_targets_are_guessed_from_the_output_and_the_loss():
    inputs = torch.zeros(4, 32)
    classes = guess_targets(_model, nn.functional.cross_entropy, inputs, 4)
    assert classes.shape == (4,) and classes.dtype == torch.long
    values = guess_targets(_model, nn.functional.mse_loss, inputs, 4)
    assert values.shape == (4, 8) and values.dtype == torch.float32
    own = guess_targets(nn.Linear(32, 1), lambda output, targets: ((targets @ targets.T) @ output).mean(), inputs, 4)
    assert own.shape == (4, 1)

    def none_will_do(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(ValueError, match="sample_targets were not given, and could not be guessed"):
        guess_targets(_model, none_will_do, inputs, 4)
