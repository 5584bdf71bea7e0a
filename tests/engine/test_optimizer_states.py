"""``optimizer.state`` by the parameters of the model; tests/test_loops.py compares such loops with one process."""

from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch

from engines import engine_of, own_shard
from toys import Regular, data

ADAM = partial(torch.optim.Adam, lr=0.01)


def _whole_states() -> dict[str, Any]:
    engine = engine_of(Regular(), partial(torch.optim.Adafactor, lr=0.01), zero=1)
    engine.step(*own_shard(engine, *data(0)))
    seen: dict[str, Any] = {}
    for name, p in engine.model.named_parameters():
        try:
            seen[name] = len(engine.optimizer.state[p])
        except RuntimeError as error:
            seen[name] = str(error)
    return seen


def test_whole_states_are_on_their_owner_and_elsewhere_a_sentence_says_where(ranks):
    both = ranks(2, _whole_states)
    owners = set()
    for name in both[0]:
        sentences = [rank for rank in (0, 1) if isinstance(both[rank][name], str)]
        if not sentences:  # it is not trained
            assert both[0][name] == both[1][name] == 0
            continue
        (other,) = sentences
        owners.add(1 - other)
        assert isinstance(both[1 - other][name], int)
        assert both[other][name].startswith(f"the optimizer's states of {name!r} are on rank {1 - other} alone")
    assert owners == {0, 1}


def _replaced() -> tuple[set[int], ...]:
    """The numbers of steps that two optimizers count, before and after all states are dropped."""

    def two(parameters: Any) -> list[torch.optim.Optimizer]:
        parameters = list(parameters)
        return [ADAM(parameters[:1]), torch.optim.AdamW(parameters[1:], lr=0.01)]

    engine = engine_of(Regular(), two, zero=1)
    counts = []
    for step in range(3):
        if step == 2:
            engine.optimizer.state = defaultdict(dict)
        engine.step(*own_shard(engine, *data(step)))
        states = [engine.optimizer.state[p] for p in engine.model.parameters() if p in engine.optimizer.state]
        counts.append({int(state["step"]) for state in states})
    return tuple(counts)


def test_states_that_are_dropped_are_dropped_by_all_optimizers(ranks):
    assert ranks(2, _replaced) == [({1}, {2}, {1})] * 2


def _written_in_16_bits(fields: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    engine = engine_of(Regular(), ADAM, precision="bf16", **fields)
    engine.step(*data(0))
    p = engine.model.get_parameter("wide.weight")
    engine.optimizer.state[p]["exp_avg"][:2] = 0
    engine.optimizer.state[p]["exp_avg_sq"] = torch.ones_like(p)
    state = engine.optimizer.state[p]
    return state["exp_avg"].clone(), state["exp_avg_sq"].clone()


@pytest.mark.parametrize("fields", [{}, {"zero": 1}, {"zero": 3}], ids=str)
def test_states_of_16_bit_parameters_are_written_in_fp32_on_one_rank_too(ranks, fields):
    (average, square) = ranks(1, _written_in_16_bits, fields)[0]
    assert average.dtype == square.dtype == torch.float32
    assert not average[:2].any() and average[2:].any() and (square == 1).all()
