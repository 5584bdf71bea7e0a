"""Which part of a batch is a sample: rows of tensors, or entries of lists."""

import pytest
import torch

from tensorshard.model.batches import batch_size, split_batch, split_unevenly

CLOUDS = [torch.randn(6, 3) for _ in range(4)]
IMAGES = [torch.randn(3, size, 5) for size in (4, 5, 6, 7)]
LABELS = torch.arange(4)


def _parts(inputs, targets=None, count=2):
    return split_batch(inputs, targets, count)


@pytest.mark.parametrize("samples", [CLOUDS, tuple(CLOUDS), IMAGES], ids=["list", "tuple", "images"])
def test_samples_in_a_list_are_cut_with_their_labels(samples):
    (first, its), (second, theirs) = _parts((samples,), LABELS)
    assert first == (samples[:2],) and second == (samples[2:],)
    assert its.tolist() == [0, 1] and theirs.tolist() == [2, 3]
    assert batch_size((samples,), LABELS) == 4
    (both, _), _ = _parts((samples, LABELS))
    assert both[0] == samples[:2] and both[1].tolist() == [0, 1]


def test_tensors_of_different_sizes_are_samples():
    ragged = [torch.randn(size, 3) for size in (2, 5, 1, 4)]
    assert [part for part, _ in _parts(ragged)] == [ragged[:2], ragged[2:]]
    assert batch_size(ragged) == 4
    assert [len(part) for part, _ in split_unevenly(ragged[:3], None, 2)] == [2, 1]


def test_columns_stay_columns():
    pair = (torch.randn(6, 3), torch.randn(6, 3))
    (first, _), _ = _parts(pair)
    assert [len(column) for column in first] == [3, 3]
    (first, its), _ = _parts([*pair], torch.arange(6))  # several arguments
    assert [len(column) for column in first] == [3, 3] and len(its) == 3
    (first, _), _ = _parts([torch.randn(6, 3), torch.arange(6)])
    assert [len(column) for column in first] == [3, 3]


@pytest.mark.parametrize("batch", [CLOUDS, [CLOUDS[0], CLOUDS[1]], {"clouds": CLOUDS}], ids=["list", "two", "dict"])
def test_what_may_be_either_is_refused(batch):
    with pytest.raises(ValueError, match=r"may be \d samples or 6: give a tuple"):
        _parts(batch)
    assert len(_parts(batch, count=1)) == 1


def test_names_beside_tensors_are_cut_with_them():
    batch = {"x": torch.randn(4, 2), "name": ["a", "b", "c", "d"], "mode": "train", "size": (4, 4), "ids": [1, 2, 3, 4]}
    (first, _), (second, _) = _parts(batch)
    assert (first["name"], second["name"]) == (["a", "b"], ["c", "d"])
    assert first["ids"] == [1, 2] and first["mode"] == "train" and second["size"] == (4, 4)
