"""Mixtures of datasets: shares, epochs, and a stream that goes on where it was."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import tensorshard as ts


class Numbers(IterableDataset[torch.Tensor]):
    """A stream without a state."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.place = 0

    def __iter__(self):
        for number in range(self.first, self.first + self.count):
            yield torch.tensor([float(number)])


class StatefulNumbers(Numbers):
    """One with a state."""

    def __iter__(self):
        while self.place < self.count:
            self.place += 1
            yield torch.tensor([float(self.first + self.place - 1)])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_datasets_of_lengths_are_mixed_in_their_shares():
    mixed = ts.data.mix([range(100), range(100, 107), range(200, 250)], [3, 1, 2])
    counts = Counter(sample // 100 for sample in mixed)
    read = Counter(mixed)
    assert counts == {0: 100, 1: 33, 2: 67}  # until the first, which takes longest, was read once
    assert set(read) == {*range(107), *range(200, 250)}
    for part in (range(100), range(100, 107), range(200, 250)):
        assert max(read[sample] for sample in part) - min(read[sample] for sample in part) <= 1
    again = [sample for sample in range(200, 250) if read[sample] == 2]
    assert again != list(range(200, 217))  # not always the first ones
    assert list(mixed) == list(ts.data.mix([range(100), range(100, 107), range(200, 250)], [6, 2, 4]))


def test_streams_are_mixed_in_their_shares():
    mixed = ts.data.mix([Numbers(0, 600), range(1000, 1010)], [2, 1])
    drawn = [int(sample) for sample in mixed]
    assert len(drawn) == pytest.approx(900, rel=0.1)
    small = Counter(number for number in drawn if number >= 1000)
    assert sum(small.values()) == pytest.approx(300, rel=0.2) and max(small.values()) - min(small.values()) <= 1
    assert [number for number in drawn if number < 1000] == list(range(600))
    mixed.set_epoch(1)
    assert [int(sample) for sample in mixed] != drawn


@pytest.mark.parametrize("kind", [Numbers, StatefulNumbers])
def test_a_mixture_goes_on_where_it_was(kind):
    make = lambda: ts.data.mix([kind(0, 1500), kind(3000, 40), range(9)], [5, 1, 1], seed=3)  # noqa: E731
    whole = [int(sample) for sample in make()]
    for stop in (1, 100, 1030, len(whole) - 1):
        stream = make()
        samples = iter(stream)
        begun = [int(next(samples)) for _ in range(stop)]
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert [*begun, *(int(sample) for sample in resumed)] == whole


def run(folder: Path, resume: bool) -> list[float]:
    """Losses of steps on rows that are packed of a mixture; a checkpoint after the third."""
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=1e-4)
    engine = ts.parallelize(nn.Linear(4, 1), ts.Plan(zero=3), optimizer=sgd, loss_fn=nn.functional.mse_loss)
    documents = [[float(n) for n in range(first, first + first % 7 + 2)] for first in range(60)]
    stream = ts.data.pack(ts.data.mix([Listed(documents[:40]), Listed(documents[40:])], [2, 1]), 4, open_rows=3)
    loader = engine.loader(stream, 4, shuffle=False, collate_fn=pairs)
    if resume:
        engine.load(folder / "three")
    losses = []
    for batch in loader:
        losses.append(engine.step(*batch).item())
        if len(losses) == 3 and not resume:
            engine.save(folder / "three")
    return losses


class Listed(IterableDataset[list[float]]):
    def __init__(self, documents: list[list[float]]) -> None:
        self.documents = documents

    def __iter__(self):
        return iter(self.documents)


def pairs(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([inputs["input_ids"] for inputs, _ in rows]) / 60, torch.stack([t for _, t in rows]).sum(
        1, True
    ) / 60


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_on_packed_mixed_streams_goes_on(ranks, tmp_path, world):
    whole = ranks(1, run, tmp_path, False)[0]
    resumed = ranks(world, run, tmp_path, True)[0]
    assert len(whole) > 10
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(whole[3:]), rtol=1e-6, atol=1e-7)


def test_what_cannot_be_mixed_is_refused():
    with pytest.raises(ValueError, match="2 datasets and 1 weights"):
        ts.data.mix([[1], [2]], [1])
    with pytest.raises(ValueError, match=r"a weight is 0; weights are finite, and above 0"):
        ts.data.mix([[1], [2]], [1, 0])
    with pytest.raises(ValueError, match="dataset 1 has no samples"):
        ts.data.mix([[1], []], [1, 1])
    with pytest.raises(ValueError, match="dataset 1 of the mixture has no samples"):
        list(ts.data.mix([Numbers(0, 5), Numbers(0, 0)], [1, 1]))
