"""Models that are not written as the zoo's are, under every plan: as in one process, or refused by name."""

import pytest

from strangers import MODELS, train

PLANS = {
    "zero1": {"zero": 1},
    "zero3": {"zero": 3},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "micro_batches": 2},
    "recompute": {"zero": 1, "recompute": "full"},
}

# What an error says, where one device itself is ambiguous, or a stage would have to know what another one does.
_SHARED = "is a view of the memory of parameter 'outlet.weight'"
REFUSED = {
    ("AveragesItself", "pp"): "torch.distributed itself (allreduce_, strangers.py:",
    ("AveragesItself", "tp"): "torch.distributed itself (allreduce, strangers.py:",
    ("WritesItsWeight", "pp"): "changes its parameter blocks.0.weight (strangers.py:",
    ("Teacher", "pp"): "engine.model.blocks.named_parameters() is listed within engine.model.teacher.named_para",
    ("Adjoint", "pp"): "inside of _Adjoint.forward, an autograd function that computes the gradients of its modules",
    ("Mapped", "pp"): "the model calls 'blocks.0' inside of a function that torch.func transforms",
    ("OtherWeights", "pp"): "runs on every stage: move it into a module that holds what it reads",
    **{("KeepsAView", plan): _SHARED for plan in PLANS},
}


FAST = {"zero3", "pp"}
# A stage waits for the one that refuses, until its timeout; and a network that compiles slowly.
SLOW = {("Teacher", "pp"), ("OtherWeights", "pp"), ("ActivationOfAll", "pp")}
CELLS = [(model, plan) for model in MODELS for plan in PLANS]


@pytest.mark.fast_cases("ActivationOfAll-zero3", "Mapped-pp", "WritesItsWeight-pp")
@pytest.mark.parametrize(
    ("model", "plan"),
    [pytest.param(*cell, marks=pytest.mark.slow if cell[1] not in FAST or cell in SLOW else ()) for cell in CELLS],
)
def test_a_model_trains_as_in_one_process(ranks, model, plan):
    # A stage that refuses its part of the model leaves the other one waiting for it.
    waits = {"group_timeout": 30} if (model, plan) in REFUSED else {}
    found = ranks(2, train, model, PLANS[plan], **waits)
    if (model, plan) in REFUSED:
        assert any(isinstance(each, str) and REFUSED[model, plan] in each for each in found), found
        return
    for each in found:
        assert not isinstance(each, str), each
        assert max(each) <= 2e-5, each
