"""Every fault of the museum is found and named, and the same layout without it is exact."""

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
@pytest.mark.fast_cases(
    "each_micro-batch's_loss_is_a_mean_over_its_own_tokens",
    "a_norm_that_counts_each_replica",
    "labels_smoothed_over_a_rank's_own_classes",
    "an_overlapped_backward_that_multiplies_by_the_wrong_rank's_weights",
    "fused_queries,_keys_and_values,_cut_in_two_in_the_middle",
    "a_later_packed_document,_at_the_positions_of_the_first",
    "expert_gradients_that_are_too_large_by_the_expert-parallel_degree",
    "tied_embeddings_on_the_first_and_last_stage,_that_nobody_keeps_equal",
    "moments_that_a_checkpoint_has_and_a_resume_drops",
)
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=_case)
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
