"""Whatever a loop does with weights and gradients, under every plan, gives what one process gives, or a sentence."""

from functools import cache
from math import prod

import pytest

import loops

PLANS = loops.PLANS | loops.EXPERT_PLANS
# Loop, plan: how the sentence begins. What one process does cannot be done there, or has another call.
_PP = "RuntimeError: under Plan(pp=2) this rank has stage"
_OFFLOADED = "RuntimeError: parameter 'blocks.0.0."
_PIPELINES = ("pp", "tp-pp", "pp-zero1", "pp-bf16")
_OFFLOADS = ("offload-zero2", "offload-zero3")
_SEQUENCES = ("cp-zero1", "cp-zero3", "tp-cp-zero1", "dp-cp-zero2", "ep-cp-zero1")
SENTENCES: dict[tuple[str, str], str] = {
    **{("replace", plan): "RuntimeError: module 'head' was replaced in the model after" for plan in PLANS},
    **{
        (loop, plan): begin
        for plan in _PIPELINES
        for loops_refused, begin in (
            (("sharpness", "double_backward", "two_engines", "gradients_by_hand", "other_weights", "clip_each"), _PP),
            (("other_method",), "RuntimeError: engine.model."),  # blocks.2, or inlet, cannot be called on this rank
            (("second_phase",), "RuntimeError: "),
            (
                ("twice",),
                "UncuttableError: the model recomputes 'blocks.0' by torch.utils.checkpoint with use_reentrant=True",
            ),
            (("ema_teacher",), "RuntimeError: engine.model.student.named_parameters() is listed within engine"),
        )
        for loop in loops_refused
    },
    **{("double_backward", plan): "NotImplementedError: context parallelism has no" for plan in _SEQUENCES},
    **{
        ("second_phase", plan): "RuntimeError: this SGD was built on engine.model.parameters(), under a plan"
        for plan in _OFFLOADS
    },
    **{(loop, plan): _OFFLOADED for loop in ("frozen_from_the_start", "add_group") for plan in _OFFLOADS},
}


# A pipeline is cut by the modules that a trial has called. One stage refuses a step that calls others, and the other
# stages wait for it until their timeout, or until its process ends.
OF_ONE_STAGE = {("steps_skip", plan) for plan in _PIPELINES}


@pytest.fixture(scope="module")
def alone(ranks):
    """What one process gives."""
    return cache(lambda loop, *dealt: ranks(1, loops.run, loop, None, *dealt)[0])


CELLS = [
    (loop, plan)
    for loop, (_, build, _) in loops.LOOPS.items()
    for plan in PLANS
    if (loop, plan) not in OF_ONE_STAGE and (plan in loops.PLANS or build is loops.Net)
]


FAST = {"zero3"}  # plans
# Under tp, loops that write weights, take gradients, and call the model in their own ways.
FAST_CELLS = {
    *((loop, "tp") for loop in ("clamp", "read", "clip_each", "penalty", "double_backward", "gradients_by_hand")),
    *((loop, "tp") for loop in ("swap", "groups", "states", "gradient_hook")),
    *((loop, "zero1") for loop in ("groups", "states", "states_of_groups")),
    ("swap", "bf16-zero1"),
    ("states", "offload-zero3"),
}


@pytest.mark.parametrize(
    ("loop", "plan"),
    [pytest.param(*cell, marks=() if cell[1] in FAST or cell in FAST_CELLS else pytest.mark.slow) for cell in CELLS],
)
def test_a_loop_gives_what_one_process_gives(ranks, alone, loop, plan):
    world_size, fields = PLANS[plan]
    parts, experts = world_size // prod(fields.get(axis, 1) for axis in ("tp", "cp", "pp")), plan in loops.EXPERT_PLANS
    dealt = parts, experts, fields.get("micro_batches", 1)
    found = ranks(world_size, loops.try_to_run, loop, fields, *dealt)
    if (loop, plan) in SENTENCES:
        assert all(isinstance(sentence, str) for sentence in found)
        assert any(sentence.startswith(SENTENCES[loop, plan]) for sentence in found)  # others may fail by that
        return
    for sentence in found:
        assert not isinstance(sentence, str), sentence
    state, values = alone(loop, *dealt)
    tolerance = 3e-2 if fields.get("precision") == "bf16" else 2e-5
    assert found[0][0].keys() == state.keys()
    for name, weight in state.items():
        assert (found[0][0][name] - weight).abs().max().item() <= tolerance, name
    for _, mine in found:
        assert mine.keys() <= values.keys()
        for name, value in mine.items():
            assert abs(value - values[name]) <= tolerance, name


def test_few_are_refused():
    assert len(CELLS) >= 200
    assert 8 * len(SENTENCES) <= len(CELLS)
