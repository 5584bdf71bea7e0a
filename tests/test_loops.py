"""Whatever a loop does with weights and gradients, under every plan, gives what one process gives, or a sentence."""

from functools import cache

import pytest

import loops

# Loop, plan: how the sentence begins. What one process does cannot be done, or has another call.
SENTENCES: dict[tuple[str, str], str] = {
    **{
        ("replace", plan): "RuntimeError: module 'head' was replaced in the model after parallelize"
        for plan in loops.PLANS
    },
}


@pytest.fixture(scope="module")
def alone(ranks):
    """What one process gives."""
    return cache(lambda loop, parts: ranks(1, loops.run, loop, None, parts)[0])


@pytest.mark.parametrize("plan", loops.PLANS)
@pytest.mark.parametrize("loop", loops.LOOPS)
def test_a_loop_gives_what_one_process_gives(ranks, alone, loop, plan):
    world_size, fields = loops.PLANS[plan]
    parts = world_size // (fields.get("tp", 1) * fields.get("pp", 1))
    found = ranks(world_size, loops.try_to_run, loop, fields, parts)
    if (loop, plan) in SENTENCES:
        for sentence in found:
            assert isinstance(sentence, str) and sentence.startswith(SENTENCES[loop, plan])
        return
    for sentence in found:
        assert not isinstance(sentence, str), sentence
    state, values = alone(loop, parts)
    tolerance = 3e-2 if fields.get("precision") == "bf16" else 2e-5
    assert found[0][0].keys() == state.keys()
    for name, weight in state.items():
        assert (found[0][0][name] - weight).abs().max().item() <= tolerance, name
    for _, mine in found:
        assert mine.keys() <= values.keys()
        for name, value in mine.items():
            assert abs(value - values[name]) <= tolerance, name


def test_few_are_refused():
    assert 8 * len(SENTENCES) <= len(loops.LOOPS) * len(loops.PLANS)
