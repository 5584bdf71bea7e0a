"""Every fault of the museum is found and named, and the same layout without it is exact."""

from typing import Any

import pytest
from benchmarks.museum import EXHIBITS
from benchmarks.museum.exhibit import Exhibit

import tensorshard as ts
from tensorshard.verify import culprit as culprits

_KINDS = {
    value for name, value in vars(culprits).items() if name.isupper() and isinstance(value, str) and name[0] != "_"
}


def _case(exhibit: Exhibit) -> str:
    return exhibit.name.replace(" ", "_")


# One of each kind, and of each way to be parallel.
_FAST = {
    "each_micro-batch's_loss_is_a_mean_over_its_own_tokens",
    "labels_smoothed_over_a_rank's_own_classes",
    "an_overlapped_backward_that_multiplies_by_the_wrong_rank's_weights",
    "expert_gradients_that_are_too_large_by_the_expert-parallel_degree",
    "moments_that_a_checkpoint_has_and_a_resume_drops",
}


def _cases() -> list[Any]:
    """These, and every fifth of the rest. `python -m benchmarks museum` looks at all, and fails if one is missed."""
    every = {_case(exhibit): exhibit for exhibit in EXHIBITS}
    assert every.keys() >= _FAST
    slow = [name for number, name in enumerate(every) if number % 5 == 0 and name not in _FAST]
    found = [pytest.param(every[name], id=name) for name in sorted(_FAST)]
    return [*found, *(pytest.param(every[name], id=name, marks=pytest.mark.slow) for name in slow)]


@pytest.mark.slow
@pytest.mark.parametrize("exhibit", _cases())
def test_is_named_and_without_its_fault_exact(exhibit):
    found = ts.verify_layout(exhibit.reference, exhibit.parallel, ranks=exhibit.ranks, gather=exhibit.gather)
    assert found.culprit is not None
    assert found.culprit.kind in exhibit.kinds, found.describe()
    assert exhibit.module in {None, found.culprit.module}, found.describe()
    if exhibit.correct is not None:
        exact = ts.verify_layout(exhibit.reference, exhibit.correct, ranks=exhibit.ranks, gather=exhibit.gather)
        assert exact, exact.describe()


def test_each_has_a_name_of_its_own_and_a_report():
    assert len({exhibit.name for exhibit in EXHIBITS}) == len(EXHIBITS) >= 40
    for exhibit in EXHIBITS:
        assert exhibit.report and exhibit.said.endswith("."), exhibit.name
        assert exhibit.kinds and exhibit.kinds <= _KINDS, exhibit.name
