"""``engine.loader(cut_sequences=True)``: each rank is given its own positions alone, and losses stay the same."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import parity
import tensorshard as ts
from tensorshard.context_parallel.split_sequences import CutSamples
from tensorshard.models import GPT, next_token_loss

LENGTH = 30


class Books(Dataset[Any]):
    """Samples of tokens and the tokens that follow, as views of a file; it notes which were copied."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Stream(IterableDataset[Any]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Any:
        return iter([torch.tensor(row)[:-1] for row in np.load(self.path)])


def _engine(fields: dict[str, Any]) -> ts.Engine:
    torch.manual_seed(0)
    model = GPT(64, LENGTH, 2, 2, 16)
    return ts.parallelize(model, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=next_token_loss)


def _trained(path: Path, fields: dict[str, Any], options: dict[str, Any]) -> Any:
    engine = _engine(fields)
    stream = options.pop("stream", False)
    data = Stream(path) if stream else Books(path)
    loader = engine.loader(data, 4, shuffle=not stream, **options)
    losses, held = [], []
    for batch in loader:
        inputs, targets = (batch, batch) if stream else batch
        assert inputs.shape[1] == LENGTH
        held.append(getattr(inputs, "local", inputs).shape[1])
        losses.append(engine.step(inputs, targets).item())
    for batch in loader:
        inputs, targets = (batch, batch) if stream else batch
        losses.append(engine.evaluate(inputs, targets).item())
    return losses, held, loader.samples_consumed


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("books") / "tokens.npy"
    generator = torch.Generator().manual_seed(0)
    np.save(path, torch.randint(64, (10, LENGTH + 1), generator=generator).numpy())
    return path


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "cp2": (2, dict(cp=2), {}),
    "cp2-zigzag": (2, dict(cp=2, cp_order="zigzag", zero=1), {}),
    "2xcp2-micro2": (4, dict(cp=2, micro_batches=2), dict(drop_last=True)),
    "cp2-tp2": (4, dict(cp=2, tp=2, zero=0), {}),
    "cp2-stream": (2, dict(cp=2), dict(stream=True)),
    "cp1": (1, dict(zero=0), {}),
}


@pytest.mark.fast_cases("cp2")
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_whole_sequences(ranks, books, case):
    world_size, fields, options = CASES[case]
    expected, _, _ = ranks(1, _trained, books, dict(zero=0), dict(options))[0]
    cp = fields.get("cp", 1)
    for losses, held, consumed in ranks(world_size, _trained, books, fields, {**options, "cut_sequences": True}):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert set(held) == {LENGTH // cp} and consumed == 0


def test_samples_are_cut_before_they_are_put_together():
    halves = [pickle.loads(pickle.dumps(CutSamples(rank, 2, "contiguous"))) for rank in range(2)]  # for workers
    sample = {"tokens": torch.arange(9), "mask": np.ones(9), "weight": 0.5, "label": torch.tensor(3)}
    (first, places), (second, _) = (half([sample, sample]) for half in halves)
    assert first["tokens"].tolist() == 2 * [[0, 1, 2, 3]] and second["tokens"].tolist() == 2 * [[4, 5, 6, 7, 8]]
    assert first["mask"].shape == (2, 4) and first["weight"].shape == first["label"].shape == (2,)
    assert places == [(1, 9), (1, 9), None, None]
    image, _ = halves[0]([torch.zeros(3, 8, 6)])
    assert image.shape == (1, 3, 4, 6)
    front_and_back, _ = CutSamples(0, 2, "zigzag")([torch.arange(8)])
    assert front_and_back.tolist() == [[0, 1, 6, 7]]
    with pytest.raises(ValueError, match="sequences of 8 and 9 positions"):
        halves[0]([torch.arange(8), torch.arange(9)])
    with pytest.raises(ValueError, match="no tensor of a sample has a sequence of at least 4"):
        halves[0]([torch.tensor(3)])


def _refused(fields: dict[str, Any], options: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        _engine(fields).loader([torch.arange(8)] * 8, 4, cut_sequences=True, **options)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        (dict(pp=2, micro_batches=2, cp=1), {}, "with pp=2, but a pipeline cuts whole sequences itself"),
        (dict(cp=2, cp_dims={"tokens": 1}), {}, "with cp_dims={'tokens': 1}, but these are names"),
        (dict(cp=2), dict(collate_fn=list), "with collate_fn, but it would be given parts"),
    ],
)
def test_what_does_not_go_with_it(ranks, fields, options, said):
    assert said in ranks(2, _refused, fields, options)[0]
